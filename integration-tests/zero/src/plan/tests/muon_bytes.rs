//! Bytes that Muon adds to a plan.

use serde_json::Value;

use super::json;

/// Muon has one moment of a matrix, buffers of its updates and exchanges. Parts of tensor
/// parallelism are joined, and a rank alone sends nothing.
#[test]
fn muon_exchanges_matrices() {
    let of = |line: &str| {
        let plan = json(&format!("--model nano --gpus {line}"));
        let at = |path: &str| plan["stages"][2].pointer(path).and_then(Value::as_u64);
        [
            "/on_cores/matrices",
            "/sent/all_to_all_bytes",
            "/sent/total_bytes",
            "/gpu/optimizer_bytes",
            "/sent/node_egress_bytes",
        ]
        .map(|path| at(path).unwrap())
    };
    for mesh in ["1", "4", "4 --tensor-parallel 2", "2 --tensor-parallel 2"] {
        let [buffers, exchanged, sent, state, _] = of(&format!("{mesh} --optimizer muon"));
        let adamw = of(mesh);
        assert_eq!(adamw[..2], [0, 0], "{mesh}");
        assert!(buffers > 0 && state < adamw[3], "{mesh}");
        assert_eq!(exchanged > 0, mesh != "1");
        assert_eq!(sent - adamw[2], exchanged, "{mesh}");
    }

    let [_, exchanged, .., egress] = of("4 --nodes 2 --optimizer muon");
    let [.., of_adamw] = of("4 --nodes 2");
    assert_eq!(egress - of_adamw, 2 * exchanged, "at most all of two GPUs");
}
