//! Folders with matrices in 4 bits of bitsandbytes: the values that bitsandbytes decodes, which
//! have the same codes as NF4.

use std::fs;

use integration_tests::data;
use safetensors::SafeTensors;
use zero_models::hf::HfFolder;
use zero_shard::BlockFormat;

/// A tensor: name, type, shape and bytes.
type Stored = (String, safetensors::Dtype, Vec<usize>, Vec<u8>);

/// The parts of the encoded values that are codes.
fn codes(blocks: &[u8]) -> Vec<u8> {
    let blocks = blocks.chunks(BlockFormat::Nf4.block_bytes());
    blocks
        .flat_map(|block| block[4..].iter().copied())
        .collect()
}

#[test]
fn values_are_those_of_bitsandbytes() {
    for kind in ["nested", "plain"] {
        let path = data(&format!("../bitsandbytes/{kind}"));
        let folder = HfFolder::open(&path).unwrap();
        assert!(folder.warnings().is_empty(), "{:?}", folder.warnings());
        let read = |file: &str| fs::read(path.join(file)).unwrap();
        let stored = read("model.safetensors");
        let decoded = read("dequantised.safetensors");
        let stored = SafeTensors::deserialize(&stored).unwrap();
        let decoded = SafeTensors::deserialize(&decoded).unwrap();
        let mut in_4_bits = 0;
        for param in folder
            .config()
            .units()
            .into_iter()
            .flat_map(|unit| unit.params)
        {
            let expected: &[u8] = decoded.tensor(&param.name).unwrap().data();
            let expected: Vec<u32> = bytemuck::pod_collect_to_vec(expected);
            let mut values = vec![0.0; expected.len()];
            folder
                .read(&param.name, 0..values.len() as u64, &mut values)
                .unwrap();
            let bits: Vec<u32> = values.iter().map(|value| value.to_bits()).collect();
            assert!(bits == expected, "{kind} {}", param.name);
            let mut part = [0.0; 5];
            folder.read(&param.name, 3..8, &mut part).unwrap();
            assert_eq!(part, values[3..8]);

            let tensor = stored.tensor(&param.name).unwrap();
            if tensor.dtype() == safetensors::Dtype::U8 {
                let mut blocks = vec![0; BlockFormat::Nf4.bytes(values.len())];
                BlockFormat::Nf4.encode(&values, &mut blocks);
                assert_eq!(codes(&blocks), tensor.data(), "{kind} {}", param.name);
                in_4_bits += 1;
            }
        }
        assert_eq!(in_4_bits, 7);
    }
}

#[test]
fn damaged_matrices_are_named() {
    let path = data("../bitsandbytes/plain");
    let file = fs::read(path.join("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let refusal = |change: &dyn Fn(&mut Vec<Stored>)| {
        let mut all: Vec<_> = tensors
            .tensors()
            .into_iter()
            .map(|(name, t)| (name, t.dtype(), t.shape().to_vec(), t.data().to_vec()))
            .collect();
        change(&mut all);
        let folder = tempfile::tempdir().unwrap();
        fs::copy(path.join("config.json"), folder.path().join("config.json")).unwrap();
        let views = all.iter().map(|(name, dtype, shape, data)| {
            let view = safetensors::tensor::TensorView::new(*dtype, shape.clone(), data);
            (name.clone(), view.unwrap())
        });
        let bytes = safetensors::serialize(views, None).unwrap();
        fs::write(folder.path().join("model.safetensors"), bytes).unwrap();
        HfFolder::open(folder.path()).err().unwrap().to_string()
    };

    let matrix = "model.layers.0.mlp.up_proj.weight";
    let missing = refusal(&|all| all.retain(|(name, ..)| *name != format!("{matrix}.quant_map")));
    let expected = format!(
        "tensor {matrix:?} of bitsandbytes: {matrix}.quant_map is missing; save the model again"
    );
    assert!(missing.ends_with(&expected), "{missing}");

    let fewer = refusal(&|all| {
        for (name, _, shape, data) in all {
            if *name == format!("{matrix}.absmax") {
                data.truncate(4);
                *shape = vec![1];
            }
        }
    });
    assert!(
        fewer.contains("1 scales for 36 blocks; save the model again"),
        "{fewer}"
    );

    let state = refusal(&|all| {
        for (name, _, _, data) in all {
            if name.contains("up_proj") && name.contains("quant_state") {
                data[0] = b'[';
            }
        }
    });
    assert!(state.contains("quant_state.bitsandbytes__nf4: "), "{state}");
}
