//! The values of the settings that a configuration has as `"auto"`.

use serde_json::{Value, json};
use zero_alloc::device::DType;

use super::record::RunRecord;
use super::{schedule, table};
use zero_config::{DsConfig, ZeroOptimization, canonical};

/// The keys with `"auto"`, in the order of the file, and their values in the run of `record`, whose
/// model has `hidden` channels.
pub(crate) fn values(file: &DsConfig, record: &RunRecord, hidden: u64) -> Vec<(String, Value)> {
    let zero = file.zero_for(hidden);
    let document = record.document();
    let value = |key: &String| {
        (
            key.clone(),
            value(&canonical(key), record, &zero, &document),
        )
    };
    file.autos.iter().map(value).collect()
}

fn value(key: &str, record: &RunRecord, zero: &ZeroOptimization, document: &Value) -> Value {
    let optimizer = &record.optimizer;
    let dtype = DType::from(record.dtype);
    match key {
        "train_batch_size" => json!(record.batch.rows_of_step()),
        "fp16.enabled" => json!(dtype == DType::F16),
        "bf16.enabled" => json!(dtype == DType::Bf16),
        "optimizer.params.betas" => json!([optimizer.hyper.beta1, optimizer.hyper.beta2]),
        "zero_optimization.prefetch_bucket_size" => json!(zero.prefetch_bucket_elems),
        "zero_optimization.param_persistence_threshold" => json!(zero.persistence_threshold_elems),
        "zero_optimization.gather_16bit_weights_on_model_save" => json!(false),
        other => match other.strip_prefix("scheduler.params.") {
            Some(param) => schedule::parameter(&optimizer.schedule, param, optimizer.lr),
            None => recorded(other, document).unwrap_or_else(|| json!("default")),
        },
    }
}

/// The value that `run.json` has of the setting with this key.
fn recorded(key: &str, document: &Value) -> Option<Value> {
    let row = table::rows().find(|row| row.key == key)?;
    let pointer = format!("/{}", row.record.replace('.', "/"));
    document.pointer(&pointer).cloned()
}
