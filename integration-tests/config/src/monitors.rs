//! `tensorboard`, `csv_monitor`, `wandb` and `comet`: where a run shows its figures.

use std::path::PathBuf;

use super::ConfigFileError;
use super::block::Block;

/// DeepSpeed's name of a job.
const JOB_NAME: &str = "DeepSpeedJobName";

/// Monitors that send figures to a service, which this program does not.
const SERVICES: [&str; 2] = ["wandb", "comet"];

/// The enabled monitors.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Monitors {
    /// `tensorboard`, if it is enabled.
    pub tensorboard: Option<MonitorFolder>,
    /// `csv_monitor`, if it is enabled.
    pub csv: Option<MonitorFolder>,
    /// A service that is enabled; both programs refuse it.
    pub service: Option<&'static str>,
}

/// The folder of a monitor: `output_path/job_name`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MonitorFolder {
    /// `output_path`; empty if it is missing.
    pub output_path: PathBuf,
    /// `job_name`, a folder in it.
    pub job_name: String,
}

pub(super) fn read(root: &mut Block) -> Result<Monitors, ConfigFileError> {
    let tensorboard = read_folder(root, "tensorboard")?;
    let csv = read_folder(root, "csv_monitor")?;
    let mut service = None;
    for name in SERVICES {
        if let Some(mut block) = root.block(name)?
            && block.flag("enabled")? == Some(true)
        {
            service.get_or_insert(name);
        }
    }
    Ok(Monitors {
        tensorboard,
        csv,
        service,
    })
}

/// The folder of a monitor of files, if it is enabled. As in DeepSpeed, a block without `enabled`
/// is off, and one with other keys is an error.
fn read_folder(
    root: &mut Block,
    key: &'static str,
) -> Result<Option<MonitorFolder>, ConfigFileError> {
    let Some(mut block) = root.block(key)? else {
        return Ok(None);
    };
    let is_enabled = block.flag("enabled")?.unwrap_or(false);
    let output_path = block.text("output_path")?.unwrap_or_default();
    let job_name = block.text("job_name")?;
    block.end_strict()?;
    Ok(is_enabled.then(|| MonitorFolder {
        output_path: output_path.into(),
        job_name: job_name.unwrap_or_else(|| JOB_NAME.to_owned()),
    }))
}

#[cfg(test)]
mod tests {
    use super::super::DsConfig;
    use super::*;

    fn monitors(text: &str) -> Monitors {
        DsConfig::parse(text).unwrap().monitors
    }

    #[test]
    fn folders_are_those_of_deepspeed() {
        let both = monitors(
            r#"{"tensorboard": {"enabled": true, "output_path": "out/logs/", "job_name": "one"},
                "csv_monitor": {"enabled": true}}"#,
        );
        let folder = |output_path: &str, job_name: &str| MonitorFolder {
            output_path: output_path.into(),
            job_name: job_name.to_owned(),
        };
        assert_eq!(both.tensorboard, Some(folder("out/logs/", "one")));
        assert_eq!(both.csv, Some(folder("", JOB_NAME)));
        assert_eq!(both.service, None);

        let off = r#"{"tensorboard": {"output_path": "x"}, "csv_monitor": {"enabled": false},
            "wandb": {"project": "x"}, "comet": {"enabled": false}}"#;
        assert_eq!(monitors(off), Monitors::default());
        let service = r#"{"wandb": {"enabled": true, "project": "x"}}"#;
        assert_eq!(monitors(service).service, Some("wandb"));

        let wrong = [
            (r#"{"tensorboard": {"path": "x"}}"#, "tensorboard.path"),
            (r#"{"csv_monitor": {"enabled": 1}}"#, "csv_monitor.enabled"),
        ];
        for (text, key) in wrong {
            let error = DsConfig::parse(text).unwrap_err().to_string();
            assert!(error.contains(key), "{error}");
        }
    }
}
