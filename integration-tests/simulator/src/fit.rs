//! The fit of the efficiencies to measured speeds.
//!
//! It minimises, over `x = ln(parameter / prior)` between bounds, the sum of squares of
//!
//! - `sqrt(weight) h(ln(predicted / measured))` for each row, where `h` makes large residuals count
//!   linearly (pseudo-Huber): one row that was measured on a bad day does not move the fit, and
//! - `sqrt(RIDGE) x` for each parameter: one that no row depends on stays at its prior.
//!
//! The method is that of Levenberg and Marquardt. A step that leaves the bounds is cut off at them;
//! a parameter at a bound that its gradient points beyond is left out of the step.

use thiserror::Error;

use crate::Efficiencies;

const PARAMS: usize = 6;
/// The index of [`Efficiencies::launch_us`].
const LAUNCH: usize = 4;
/// Weight of the squared logarithm of a parameter over its prior.
const RIDGE: f64 = 0.003;
/// Residual above which a row counts linearly: the usual scatter of measurements.
const HUBER: f64 = 0.04;
/// Step of the differences of the logarithms, in which queues are almost linear.
const DIFFERENCE: f64 = 1e-3;
/// Steps after which the fit stops in any case.
const MAX_STEPS: usize = 200;
/// Damping at which a step is too small to matter.
const MAX_DAMPING: f64 = 1e10;
/// Starts, as a multiple of the launch time's prior: where the GPU is slower than the host, the
/// launch time has no gradient.
const STARTS: [f64; 2] = [1.0, 3.0];

type Vector = [f64; PARAMS];
type Matrix = [Vector; PARAMS];

/// Fitted efficiencies.
#[derive(Clone, Debug, PartialEq)]
pub struct Fit {
    /// The efficiencies.
    pub efficiencies: Efficiencies,
    /// For each row, `ln(predicted / measured)`.
    pub residuals: Vec<f64>,
    /// Half of the sum of squares that was minimised.
    pub cost: f64,
}

/// Why efficiencies cannot be fitted.
#[derive(Clone, Copy, Debug, PartialEq, Error)]
#[allow(missing_docs, reason = "the messages name the fields")]
#[non_exhaustive]
pub enum FitError {
    /// There is nothing to fit to.
    #[error("no measured rows to fit to; fill in tok_s_gpu of at least one, better of eight")]
    NoRows,
    /// A measured speed that has no logarithm.
    #[error("row {row} of the fit was measured at {value} tokens/s; it must be above 0")]
    Measured { row: usize, value: f64 },
    /// A prediction at the priors that has no logarithm.
    #[error("row {row} of the fit is predicted at {value} tokens/s; check its sizes")]
    Predicted { row: usize, value: f64 },
}

/// [`fit_weighted`] with equal weights.
///
/// # Errors
/// No row, or a speed that is not a finite number above 0.
pub fn fit(
    prior: &Efficiencies,
    measured: &[f64],
    predict: impl Fn(&Efficiencies, usize) -> f64,
) -> Result<Fit, FitError> {
    fit_weighted(prior, measured, &vec![1.0; measured.len()], predict)
}

/// Fits efficiencies, which start at `prior`, to `measured` speeds in tokens per second and GPU, of
/// which each counts as much as its weight (see [`row_weights`](crate::row_weights)). `predict`
/// returns the speed of a row, an index into `measured`, for efficiencies between
/// [`Efficiencies::LOW`] and [`Efficiencies::HIGH`]. Equal arguments give equal results.
///
/// # Errors
/// No row, or a speed that is not a finite number above 0.
pub fn fit_weighted(
    prior: &Efficiencies,
    measured: &[f64],
    weights: &[f64],
    predict: impl Fn(&Efficiencies, usize) -> f64,
) -> Result<Fit, FitError> {
    if measured.is_empty() {
        return Err(FitError::NoRows);
    }
    for (row, &value) in measured.iter().enumerate() {
        if !is_speed(value) {
            return Err(FitError::Measured { row, value });
        }
        let value = predict(prior, row);
        if !is_speed(value) {
            return Err(FitError::Predicted { row, value });
        }
    }

    let problem = Problem::new(prior, measured, weights, predict);
    let mut best: Option<(f64, Vector)> = None;
    for start in STARTS {
        let mut x = [0.0; PARAMS];
        x[LAUNCH] = start.ln();
        let (cost, x) = problem.minimise(x);
        if best.is_none_or(|(lowest, _)| cost < lowest) {
            best = Some((cost, x));
        }
    }
    let (cost, x) = best.ok_or(FitError::NoRows)?;
    Ok(Fit {
        efficiencies: problem.efficiencies(&x),
        residuals: problem.logarithms(&x),
        cost,
    })
}

fn is_speed(value: f64) -> bool {
    value.is_finite() && value > 0.0
}

/// The function to minimise.
struct Problem<'a, P> {
    measured: &'a [f64],
    weights: &'a [f64],
    predict: P,
    prior: Vector,
    low: Vector,
    high: Vector,
}

impl<'a, P: Fn(&Efficiencies, usize) -> f64> Problem<'a, P> {
    fn new(prior: &Efficiencies, measured: &'a [f64], weights: &'a [f64], predict: P) -> Self {
        let prior = prior.to_array();
        let logarithms = |bound: Efficiencies| {
            let bound = bound.to_array();
            std::array::from_fn(|i| (bound[i] / prior[i]).ln())
        };
        Self {
            measured,
            weights,
            predict,
            prior,
            low: logarithms(Efficiencies::LOW),
            high: logarithms(Efficiencies::HIGH),
        }
    }

    /// Returns the lowest cost found from `x`, and where.
    fn minimise(&self, mut x: Vector) -> (f64, Vector) {
        let mut residuals = self.residuals(&x);
        let mut cost = self.cost(&residuals, &x);
        let mut damping = 1e-3;

        for _ in 0..MAX_STEPS {
            let (normal, gradient) = self.linearise(&x, &residuals);
            let before = cost;
            while damping < MAX_DAMPING {
                let next = self.step(&x, &normal, &gradient, damping);
                let next_residuals = self.residuals(&next);
                let next_cost = self.cost(&next_residuals, &next);
                if next_cost < cost {
                    (x, residuals, cost) = (next, next_residuals, next_cost);
                    damping = (damping / 5.0).max(1e-9);
                    break;
                }
                damping *= 4.0;
            }
            if before - cost <= 1e-10 * before {
                break;
            }
        }
        (cost, x)
    }

    /// The matrix `J'J + RIDGE` of the normal equations and the gradient of the cost, by forward
    /// differences, or backward ones at an upper bound.
    fn linearise(&self, x: &Vector, residuals: &[f64]) -> (Matrix, Vector) {
        let mut slopes = Vec::with_capacity(PARAMS);
        for i in 0..PARAMS {
            let inward = if x[i] + DIFFERENCE > self.high[i] {
                -DIFFERENCE
            } else {
                DIFFERENCE
            };
            let mut moved = *x;
            moved[i] += inward;
            let moved = self.residuals(&moved);
            let pairs = moved.iter().zip(residuals);
            let column: Vec<f64> = pairs.map(|(moved, at)| (moved - at) / inward).collect();
            slopes.push(column);
        }

        let mut normal = [[0.0; PARAMS]; PARAMS];
        let mut gradient = [0.0; PARAMS];
        for i in 0..PARAMS {
            for j in 0..PARAMS {
                normal[i][j] = dot(&slopes[i], &slopes[j]);
            }
            normal[i][i] += RIDGE;
            gradient[i] = dot(&slopes[i], residuals) + RIDGE * x[i];
        }
        (normal, gradient)
    }

    /// The place that a damped step leads to, between the bounds.
    fn step(&self, x: &Vector, normal: &Matrix, gradient: &Vector, damping: f64) -> Vector {
        let mut matrix = *normal;
        let mut descent = gradient.map(|slope| -slope);
        for i in 0..PARAMS {
            matrix[i][i] *= 1.0 + damping;
            let blocked_low = x[i] <= self.low[i] && descent[i] < 0.0;
            let blocked_high = x[i] >= self.high[i] && descent[i] > 0.0;
            if blocked_low || blocked_high {
                matrix[i] = [0.0; PARAMS];
                for row in &mut matrix {
                    row[i] = 0.0;
                }
                matrix[i][i] = 1.0;
                descent[i] = 0.0;
            }
        }
        let step = solve(matrix, descent);
        std::array::from_fn(|i| (x[i] + step[i]).max(self.low[i]).min(self.high[i]))
    }

    fn efficiencies(&self, x: &Vector) -> Efficiencies {
        Efficiencies::from_array(std::array::from_fn(|i| self.prior[i] * x[i].exp()))
    }

    fn logarithms(&self, x: &Vector) -> Vec<f64> {
        let efficiencies = self.efficiencies(x);
        let rows = self.measured.iter().enumerate();
        rows.map(|(row, measured)| ((self.predict)(&efficiencies, row) / measured).ln())
            .collect()
    }

    fn residuals(&self, x: &Vector) -> Vec<f64> {
        let rows = self.logarithms(x).into_iter().zip(self.weights);
        rows.map(|(error, weight)| weight.sqrt() * huber(error))
            .collect()
    }

    /// Half of the sum of squares; infinite where a prediction is NaN.
    fn cost(&self, residuals: &[f64], x: &Vector) -> f64 {
        let cost = 0.5 * (dot(residuals, residuals) + RIDGE * dot(x, x));
        if cost.is_finite() {
            cost
        } else {
            f64::INFINITY
        }
    }
}

/// The residual whose square is the pseudo-Huber loss of `error`:
/// `HUBER sqrt(2 (sqrt(1 + z^2) - 1))` with `z = error / HUBER`, in a form that is exact near 0.
fn huber(error: f64) -> f64 {
    let root = (error / HUBER).hypot(1.0);
    error * (2.0 / (root + 1.0)).sqrt()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Solves `matrix x = right` of a symmetric positive definite matrix, by elimination.
fn solve(mut matrix: Matrix, mut right: Vector) -> Vector {
    for column in 0..PARAMS {
        for row in column + 1..PARAMS {
            let pivot = matrix[column];
            let factor = matrix[row][column] / pivot[column];
            for (entry, above) in matrix[row].iter_mut().zip(pivot).skip(column) {
                *entry -= factor * above;
            }
            right[row] -= factor * right[column];
        }
    }
    for row in (0..PARAMS).rev() {
        let known: f64 = (row + 1..PARAMS).map(|k| matrix[row][k] * right[k]).sum();
        right[row] = (right[row] - known) / matrix[row][row];
    }
    right
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A speed that depends on every parameter but `network`.
    fn speed(efficiencies: &Efficiencies, row: usize) -> f64 {
        let row = row as f64;
        let gpu = (1.0 + row) / efficiencies.products
            + 2.0 * (row % 3.0) / efficiencies.attention
            + (row % 2.0) / efficiencies.memory
            + 0.5 * (row % 5.0) * efficiencies.slowdown;
        1000.0 / gpu.max(efficiencies.launch_us * 0.01 * (row % 4.0))
    }

    fn measured(efficiencies: &Efficiencies) -> Vec<f64> {
        (0..16).map(|row| speed(efficiencies, row)).collect()
    }

    #[test]
    fn known_efficiencies_are_found() {
        let truth = Efficiencies {
            products: 0.6,
            attention: 0.4,
            ..Efficiencies::PRIOR
        };
        let fit = fit(&Efficiencies::PRIOR, &measured(&truth), speed).unwrap();
        assert!(
            (fit.efficiencies.products / 0.6 - 1.0).abs() < 0.02,
            "{fit:?}"
        );
        assert!(
            (fit.efficiencies.attention / 0.4 - 1.0).abs() < 0.02,
            "{fit:?}"
        );
        assert_eq!(fit.efficiencies.network, Efficiencies::PRIOR.network);
        assert!(fit.residuals.iter().all(|residual| residual.abs() < 0.01));
    }

    #[test]
    fn priors_fit_their_own_speeds() {
        let fit = fit(&Efficiencies::PRIOR, &measured(&Efficiencies::PRIOR), speed).unwrap();
        assert_eq!(fit.efficiencies, Efficiencies::PRIOR);
        assert_eq!(fit.cost, 0.0);
    }

    #[test]
    fn outlier_moves_little() {
        let truth = measured(&Efficiencies::PRIOR);
        let mut wrong = truth.clone();
        wrong[3] *= 0.5;
        let fit = fit(&Efficiencies::PRIOR, &wrong, speed).unwrap();
        let others = fit
            .residuals
            .iter()
            .enumerate()
            .filter(|(row, _)| *row != 3);
        let mean = others.map(|(_, residual)| residual.abs()).sum::<f64>() / 15.0;
        assert!(mean < 0.02, "{mean}");
    }

    /// Twelve rows that are all wrong in the same way count as one if their weights add up to one.
    #[test]
    fn weights_are_counts_of_rows() {
        let truth = measured(&Efficiencies::PRIOR);
        let mut once = truth.clone();
        once.push(0.9 * truth[1]);
        let mut often = truth.clone();
        often.extend([0.9 * truth[1]; 12]);
        let row = |row: usize| if row < 16 { row } else { 1 };
        let of = |measured: &[f64], weight: f64| {
            let weights: Vec<f64> = (0..measured.len())
                .map(|row| if row < 16 { 1.0 } else { weight })
                .collect();
            let predict = |efficiencies: &Efficiencies, at: usize| speed(efficiencies, row(at));
            fit_weighted(&Efficiencies::PRIOR, measured, &weights, predict).unwrap()
        };

        let expected = of(&once, 1.0);
        let weighted = of(&often, 1.0 / 12.0);
        let pairs = expected
            .efficiencies
            .to_array()
            .into_iter()
            .zip(weighted.efficiencies.to_array());
        for (expected, weighted) in pairs {
            assert!(
                (expected / weighted - 1.0).abs() < 1e-3,
                "{expected} {weighted}"
            );
        }
        assert!((of(&often, 1.0).cost / expected.cost - 1.0).abs() > 0.1);
    }

    #[test]
    fn bounds_hold() {
        let fast: Vec<f64> = measured(&Efficiencies::PRIOR)
            .iter()
            .map(|speed| 50.0 * speed)
            .collect();
        let fit = fit(&Efficiencies::PRIOR, &fast, speed).unwrap();
        let high = Efficiencies::HIGH.to_array();
        for (value, high) in fit.efficiencies.to_array().into_iter().zip(high) {
            assert!(value <= high * (1.0 + 1e-12), "{fit:?}");
        }
        assert!((fit.efficiencies.products / Efficiencies::HIGH.products - 1.0).abs() < 1e-12);
    }

    #[test]
    fn speeds_without_logarithms_are_refused() {
        assert_eq!(fit(&Efficiencies::PRIOR, &[], speed), Err(FitError::NoRows));
        assert_eq!(
            fit(&Efficiencies::PRIOR, &[1.0, 0.0], speed),
            Err(FitError::Measured { row: 1, value: 0.0 })
        );
        let error = fit(&Efficiencies::PRIOR, &[1.0], |_, _| f64::INFINITY).unwrap_err();
        assert_eq!(
            error,
            FitError::Predicted {
                row: 0,
                value: f64::INFINITY
            }
        );
        // Beyond the priors, a step to a NaN is refused.
        let partly = |efficiencies: &Efficiencies, row| match efficiencies.products {
            0.7 => speed(efficiencies, row),
            _ => f64::NAN,
        };
        assert!(
            fit(&Efficiencies::PRIOR, &[1.0, 2.0], partly)
                .unwrap()
                .cost
                .is_finite()
        );
    }
}
