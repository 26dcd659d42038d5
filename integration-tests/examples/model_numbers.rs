//! Writes the logits, the loss and the gradients of a model on some rows of tokens, for comparison
//! with other implementations (benches/peers/random_models.py):
//!
//! ```sh
//! cargo run --release -p integration-tests --example model_numbers -- FOLDER SEQ TOKENS.u32 OUT.safetensors
//! ```
//!
//! FOLDER is a Hugging Face folder. TOKENS.u32 has rows of SEQ + 1 little-endian u32: the inputs are
//! a row without its last token, the targets without its first.

use std::collections::HashMap;
use std::path::Path;
use std::time::Duration;

use safetensors::Dtype;
use safetensors::tensor::TensorView;
use zero_alloc::Pool;
use zero_alloc::device::{DType, Device, DeviceId, DeviceSlice, Stream};
use zero_alloc::host::HostDevice;
use zero_models::ModelOptions;
use zero_models::hf::HfFolder;
use zero_models::ops::Threads;
use zero_trainer::{Batch, Grad, ModelError, ModelRanks};

const LIMIT: Duration = Duration::from_secs(600);

/// The slice of a vector that lives until the stream has been drained.
fn slice<T>(data: &mut [T]) -> DeviceSlice<T> {
    // SAFETY: the vectors live until the end of `numbers`, which drains the stream before it reads
    // them.
    unsafe { DeviceSlice::from_raw_parts(data.as_mut_ptr(), data.len(), DeviceId::HOST) }
}

/// A name, a shape and the elements.
type Tensor = (String, Vec<usize>, Vec<f32>);

fn batch_of(tokens: &[u8], seq: usize) -> Batch {
    let tokens: Vec<u32> = tokens
        .chunks_exact(4)
        .map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
        .collect();
    let rows = || tokens.chunks_exact(seq + 1);
    Batch::plain(
        rows()
            .flat_map(|row| row[..seq].to_vec())
            .collect::<Vec<_>>(),
        rows().flat_map(|row| row[1..].to_vec()).collect::<Vec<_>>(),
    )
}

fn numbers(folder: &HfFolder, batch: &Batch, seq: usize) -> Result<Vec<Tensor>, ModelError> {
    let config = folder.config();
    let units = config.units();
    let rows = batch.inputs.len() / seq;
    let options = ModelOptions::new(rows, seq, DType::F32);

    let mut params = Vec::new();
    for unit in &units {
        let mut flat = Vec::new();
        for param in &unit.params {
            let numel: u64 = param.shape.iter().product();
            let mut values = vec![0.0; numel as usize];
            folder.read(&param.name, 0..numel, &mut values)?;
            flat.extend(values);
        }
        params.push(flat);
    }

    let mut grads: Vec<Vec<f32>> = params.iter().map(|p| vec![0.0; p.len()]).collect();
    let mut logits = vec![0.0; batch.inputs.len() * config.vocab_size()];
    let mut scale = [1.0];
    let device = HostDevice::new();
    let stream = device.create_stream("compute")?;
    let pool = Pool::new(device.clone(), usize::MAX);
    let mut model = config.on_host(
        options,
        &pool,
        &stream,
        Threads::new(1)?,
        &ModelRanks::default(),
    )?;
    let flats: Vec<_> = params.iter_mut().map(|p| slice(p).erase()).collect();
    let sums: Vec<_> = grads.iter_mut().map(|g| Grad::Add(slice(g))).collect();
    // SAFETY: used on the stream of the passes, while the model lives.
    let loss = unsafe { model.loss() }.erase();
    device.fill_zero(&stream, loss)?;

    model.set_batch(&stream, batch)?;
    let passes = config.passes();
    for (i, pass) in passes.iter().enumerate() {
        let reads: Vec<_> = pass.forward_reads.iter().map(|&u| flats[u]).collect();
        model.forward(&stream, i, &reads)?;
        if i + 1 == passes.len() {
            model.logits(&stream, &reads, slice(&mut logits))?;
        }
    }
    for (i, pass) in passes.iter().enumerate().rev() {
        let reads: Vec<_> = pass.backward_reads.iter().map(|&u| flats[u]).collect();
        let adds: Vec<_> = pass.grads.iter().map(|&u| sums[u]).collect();
        model.backward(&stream, i, &reads, &adds, slice(&mut scale))?;
    }
    let mut sum = [0; 8];
    device.download(&stream, loss, &mut sum, LIMIT)?;
    stream.synchronize(LIMIT)?;

    let mut all = vec![
        (
            "loss".to_owned(),
            vec![1],
            vec![f64::from_le_bytes(sum) as f32],
        ),
        (
            "logits".to_owned(),
            vec![rows, seq, config.vocab_size()],
            logits,
        ),
    ];
    for (unit, grad) in units.iter().zip(&grads) {
        let mut rest = grad.as_slice();
        for param in &unit.params {
            let shape: Vec<usize> = param.shape.iter().map(|&n| n as usize).collect();
            let (own, tail) = rest.split_at(shape.iter().product());
            rest = tail;
            all.push((param.name.clone(), shape, own.to_vec()));
        }
    }
    Ok(all)
}

fn main() -> Result<(), ModelError> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [folder, seq, tokens, out] = args.as_slice() else {
        return Err("usage: model_numbers FOLDER SEQ TOKENS.u32 OUT.safetensors".into());
    };
    let seq: usize = seq.parse()?;
    let folder = HfFolder::open(Path::new(folder))?;
    let batch = batch_of(&std::fs::read(tokens)?, seq);
    let tensors = numbers(&folder, &batch, seq)?;

    let bytes: Vec<(String, Vec<usize>, Vec<u8>)> = tensors
        .into_iter()
        .map(|(name, shape, values)| {
            let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            (name, shape, bytes)
        })
        .collect();
    let mut views = HashMap::new();
    for (name, shape, bytes) in &bytes {
        views.insert(
            name.clone(),
            TensorView::new(Dtype::F32, shape.clone(), bytes)?,
        );
    }
    safetensors::serialize_to_file(views, None, Path::new(out))?;
    Ok(())
}
