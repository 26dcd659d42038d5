use clap::Parser;

use super::{Line, usage_error};

/// The lines `flags => outcome` of a table.
fn cases(table: &str) -> impl Iterator<Item = (&str, &str)> {
    let lines = table.lines().filter(|line| !line.trim().is_empty());
    lines.map(|line| line.trim().split_once(" => ").unwrap())
}

#[test]
fn wrong_use_is_an_error() {
    let table = r#"
        --model gpt5 --gpus 1 => no model preset "gpt5"
        --model nano --gpus 0 => --gpus 0 --nodes 1
        --model nano --gpus 6 --nodes 4 => --gpus 6 --nodes 4
        --model nano --gpus 6 --nodes 0 => --gpus 6 --nodes 0
        --params 1e12 --gpus 100000000 => --gpus 100000000 --nodes 1: on how many nodes are they?
        --layers 2 --hidden 100 --gpus 1 => --hidden 100: not a multiple of 64, the usual width of a head; pass --heads
        --layers 2 --hidden 128 --heads 3 --gpus 1 => not divisible by its n_head 3
        --layers 2 --hidden 128 --kv-heads 1 --architecture gpt2 --gpus 1 => a GPT-2 has as many as --heads, 2
        --layers 2 --hidden 512 --kv-heads 3 --gpus 1 => num_key_value_heads
        --layers 0 --hidden 128 --gpus 1 => --layers 0: expected at least 1
        --layers 1000000 --hidden 128 --gpus 1 => n_layer is 1000000
        --model nano --gpus 1 --seq-len 0 => expected 1 to 256
        --model nano --gpus 1 --seq-len 257 => expected 1 to 256
        --model nano --gpus 1 --micro-batch 0 => --micro-batch 0: expected at least 1
        --model nano --gpus 1 --grad-accum 0 => --grad-accum 0: expected at least 1
        --model nano --gpus 1 --bucket-elems 0 => --bucket-elems 0: expected at least 1
        --params 1e9 --gpus 1 --seq-len 0 => --seq-len 0: expected at least 1
        --model nano --gpus 1 --offload-activations => add --activation-checkpointing
        --params 7B --gpus 8 --optimizer muon => pass --model, or --layers and --hidden
        --model nano --gpus 2 --optimizer muon --lora r=4 => use AdamW with --lora
        --model nano --gpus 1 --dtype fp32 --masters remainder => it needs --dtype bf16
        --model nano --gpus 1 --moments bf16 => the optimizer is not offloaded
        --params 1e18 --gpus 1 --seq-len 18446744073709551615 => 64 bits
    "#;
    for (line, part) in cases(table) {
        let error = usage_error(line);
        assert!(error.contains(part), "{line}: {error}");
    }

    let table = "
        --gpus 4 => MissingRequiredArgument
        --model nano => MissingRequiredArgument
        --model nano --params 1e9 --gpus 1 => ArgumentConflict
        --params 1e9 --layers 2 --hidden 128 --gpus 1 => ArgumentConflict
        --layers 2 --gpus 1 => MissingRequiredArgument
        --hidden 2 --gpus 1 => MissingRequiredArgument
        --params 1e12 --hidden 2 --gpus 1 => ArgumentConflict
        --model gpt2-124m --hidden 2 --gpus 1 => ArgumentConflict
        --model nano --heads 2 --gpus 1 => ArgumentConflict
        --params 1e9 --kv-heads 2 --gpus 1 => ArgumentConflict
        --params 1e9 --ffn 2 --gpus 1 => ArgumentConflict
        --params 1e9 --vocab 2 --gpus 1 => ArgumentConflict
        --params 1e9 --gpus 1 --gpu-memory 0 => ValueValidation
        --params 1e9 --gpus 1 --gpu-memory 2PiB => ValueValidation
        --params none --gpus 1 => ValueValidation
        --params 0 --gpus 1 => ValueValidation
        --params 1e9 --gpus 1 --gpu-memory 24X => ValueValidation
        --params 1e9 --gpus 1 --gpu-memory 80 => ValueValidation
        --params 7.5 --gpus 1 => ValueValidation
        --params 1e9 --gpus 1 --offload disk => ValueValidation
        --params 1e9 --gpus 1 --peak-tflops 0 => ValueValidation
        --params 1e9 --gpus 1 --drive-tbw inf => ValueValidation
        --params 1e9 --gpus 1 --offload-params nvme: => ValueValidation
    ";
    for (line, kind) in cases(table) {
        let error = Line::try_parse_from(["plan"].into_iter().chain(line.split_whitespace()))
            .err()
            .unwrap();
        assert_eq!(error.exit_code(), 2, "{line}");
        assert_eq!(format!("{:?}", error.kind()), kind, "{line}");
    }
}
