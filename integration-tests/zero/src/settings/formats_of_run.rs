//! The settings of a run for what is in few bits: parameters, gradients and frozen units.

use zero_kernels::Codec;
use zero_shard::BlockFormat;
use zero_trainer::{ErrorFeedback, QuantisedGrads, Settings};

use super::quantise::{FrozenBits, ParamBits};
use super::sources::Sources;
use crate::error::CliError;

/// Sets the formats of communication.
///
/// # Errors
/// Settings of error feedback without quantised gradients.
pub(crate) fn apply(from: &Sources, settings: &mut Settings) -> Result<(), CliError> {
    let all = &from.all.quantise;
    let is_int8 = all.quantize_params == Some(ParamBits::Int8);
    settings.gather_codec = is_int8.then_some(Codec::Blocks(BlockFormat::Int8));
    settings.quantised_frozen = all.quantize_frozen.and_then(FrozenBits::format);
    let formats = all.quantize_grads.and_then(|bits| bits.0);
    let has_feedback = all.error_feedback == Some(true);
    if has_feedback && formats.is_none() && from.given.quantise.error_feedback == Some(true) {
        return Err(usage!(
            "--error-feedback: gradients travel as they are, so nothing is left out; add --quantize-grads int8,int4"
        ));
    }
    let feedback = has_feedback.then(|| ErrorFeedback {
        keep: all.error_feedback_beta.unwrap_or(0.0),
        reset_every: all.error_feedback_reset.filter(|every| *every > 0),
    });
    settings.quantised_grads = formats.map(|[within, between]| QuantisedGrads {
        within,
        between,
        feedback,
    });
    settings.check_formats().map_err(CliError::usage)
}

#[cfg(test)]
mod tests {
    use zero_alloc::device::DType;
    use zero_shard::ZeroStage;

    use super::*;
    use crate::settings::args::{TrainArgs, parsed};
    use crate::settings::quantise::GradBits;

    fn applied(flags: &str, recorded: &str, stage: ZeroStage) -> Result<Settings, String> {
        let from = Sources::new(&parsed(flags), &TrainArgs::default(), parsed(recorded));
        let mut settings = Settings::new(stage, DType::F32, zero_models::param_kind);
        let applied = apply(&from, &mut settings);
        applied
            .map(|()| settings)
            .map_err(|error| error.to_string())
    }

    #[test]
    fn flags_choose_formats() {
        let all = "--quantize-params int8 --quantize-grads int8,int4 --error-feedback \
                   --error-feedback-beta 0.8 --error-feedback-reset 512";
        let settings = applied(all, "", ZeroStage::Two).unwrap();
        assert_eq!(
            settings.gather_codec,
            Some(Codec::Blocks(BlockFormat::Int8))
        );
        let expected = QuantisedGrads {
            within: BlockFormat::Int8,
            between: BlockFormat::Int4,
            feedback: Some(ErrorFeedback {
                keep: 0.8,
                reset_every: Some(512),
            }),
        };
        assert_eq!(settings.quantised_grads, Some(expected));
        // A resumed run keeps them, and flags switch them off.
        let resumed = applied("", all, ZeroStage::Two).unwrap();
        assert_eq!(resumed.quantised_grads, Some(expected));
        let off = "--quantize-params none --quantize-grads none";
        let off = applied(off, all, ZeroStage::Two).unwrap();
        assert_eq!((off.gather_codec, off.quantised_grads), (None, None));
        let both = applied("--quantize-grads int4", "", ZeroStage::One).unwrap();
        let both = both.quantised_grads.unwrap();
        assert_eq!([both.within, both.between], [BlockFormat::Int4; 2]);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let alone = applied("--error-feedback", "", ZeroStage::One).unwrap_err();
        assert!(alone.contains("add --quantize-grads"), "{alone}");
        for flags in ["--quantize-params int8", "--quantize-grads int8"] {
            let text = applied(flags, "", ZeroStage::Zero).unwrap_err();
            assert!(text.contains("at stage 0"), "{text}");
        }
        for wrong in ["int2", "int8,", "int8,none", ""] {
            assert!(wrong.parse::<GradBits>().is_err(), "{wrong}");
        }
    }
}
