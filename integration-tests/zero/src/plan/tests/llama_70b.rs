//! Llama-2-70B on eight cards of 24 GiB.

use super::{json, text};

/// "70B on eight 24 GB cards with ZeRO-3": every figure by hand.
#[test]
fn llama_70b_on_eight_cards() {
    let line = "--model llama2-70b --gpus 8 --gpu-memory 24GiB";
    let report = json(line);
    // Embedding and head of 32000 x 8192; a layer's q and o, k and v, three of the MLP, two norms.
    let layer = 2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672 + 2 * 8192;
    let params = 2 * 32000 * 8192 + 80 * layer + 8192_u64;
    assert_eq!(params, 68_976_648_192);
    assert_eq!(report["model"]["params"], params);
    let gpu = &report["stages"][3]["gpu"];
    for (part, bytes) in [("params", 2), ("grads", 2), ("optimizer", 12)] {
        assert_eq!(gpu[format!("{part}_bytes")], bytes * params / 8, "{part}");
    }
    // Two gathered layers; two buckets of one, and the head's gradient in fp32.
    assert_eq!(gpu["gathered_bytes"], 2 * 2 * layer);
    assert_eq!(gpu["buckets_bytes"], 2 * 2 * layer);

    let shown = text(line);
    for sentence in [
        "16 bytes a parameter: they alone are 128.48 GiB on each GPU, which has 24.00 GiB",
        "Stage 3 fits with --activation-checkpointing, --offload-params cpu (1.00 TiB of host memory in each node)",
        "On drives: --activation-checkpointing, --offload nvme:DIR, --offload-params nvme:DIR (",
        "of host memory and 1.00 TiB of a drive in each node)",
        "With --activation-checkpointing it fits on ",
    ] {
        assert!(shown.contains(sentence), "{sentence:?} is not in {shown}");
    }

    let fits = |more: &str| json(&format!("{line} {more}"))["stages"][3]["fits"] == true;
    let checkpointing = "--activation-checkpointing";
    assert!(fits(&format!("{checkpointing} --offload-params cpu")));
    let drives = "--offload nvme:/d --offload-params nvme:/d";
    assert!(fits(&format!("{checkpointing} {drives}")));
    assert!(!fits(&format!("{checkpointing} --offload cpu")));
    assert!(!fits(drives));

    let gpus = shown.split("it fits on ").nth(1).unwrap();
    let gpus: u64 = gpus.split(' ').next().unwrap().parse().unwrap();
    let fits_on = |gpus: u64| {
        let nodes = gpus / 8;
        let of = format!("--model llama2-70b --gpus {gpus} --nodes {nodes} --gpu-memory 24GiB");
        json(&format!("{of} {checkpointing}"))["stages"][3]["fits"] == true
    };
    assert!(fits_on(gpus) && !fits_on(gpus - 8), "{gpus}");
}
