//! The route of collectives over all ranks: one ring, or two levels, within machines and between
//! them. Sums have another order in two levels, so the numbers differ within rounding. The route is
//! that of the machines of each run, so a resumed run chooses anew.

use zero_trainer::MeshSettings;

use super::args::Collectives;
use super::mesh::group_flag;
use crate::error::CliError;

/// The route of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Route {
    /// Data ranks of a machine, with two levels.
    pub(crate) two_level: Option<usize>,
    /// Whether the machines decided, and not a flag.
    pub(crate) is_auto: bool,
    /// The route and its reason, for the start of a run; `None` where no other route exists and
    /// none was requested.
    pub(crate) text: Option<String>,
}

/// Chooses the route of `ranks` ranks with the groups and the parts of `mesh`, on machines of
/// `node_ranks` ranks, if that is known.
///
/// # Errors
/// Two levels are requested, and there are groups, or the ranks of a machine are not known or are
/// not whole ranks of tensor parallelism.
pub(crate) fn route(
    requested: Collectives,
    mesh: &MeshSettings,
    ranks: usize,
    node_ranks: Option<usize>,
) -> Result<Route, CliError> {
    let is_auto = requested == Collectives::Auto;
    let flag = match requested {
        Collectives::Auto => "--collectives auto",
        Collectives::Flat => "--collectives flat",
        Collectives::TwoLevel => "--collectives two-level",
    };
    let ring = |why: &str| Route {
        two_level: None,
        is_auto,
        text: Some(format!("in one ring over all ranks ({flag}: {why})")),
    };
    let unless_requested = |route: Route, error: String| match requested {
        Collectives::TwoLevel => Err(usage!("{flag}{error}")),
        _ => Ok(route),
    };

    if requested == Collectives::Flat {
        return Ok(ring("requested"));
    }
    if let Some(group) = mesh.shard_group {
        let groups = group_flag(mesh);
        let route = Route {
            text: None,
            ..ring("")
        };
        return unless_requested(
            route,
            format!(
                " with {groups} {group}: groups already have two levels; remove one of the two"
            ),
        );
    }
    let Some(of_node) = node_ranks else {
        return unless_requested(
            ring("the ranks of a machine are not known; pass --ranks-per-node L"),
            format!(
                ": the launcher passes no number of consecutive ranks of a machine that divides the {ranks} ranks; pass \
                 --ranks-per-node L"
            ),
        );
    };

    let tensor = mesh.tensor_ranks.unwrap_or(1);
    if !of_node.is_multiple_of(tensor) {
        return unless_requested(
            ring("machines have no whole groups of --tensor-parallel"),
            format!(
                " with --tensor-parallel {tensor} on machines of {of_node} ranks: expected a number that divides them"
            ),
        );
    }
    if of_node == ranks {
        let route = ring("all ranks are on one machine");
        return Ok(Route {
            text: route.text.filter(|_| !is_auto),
            ..route
        });
    }
    let level = of_node / tensor;
    if level == 1 {
        return Ok(ring("each machine has one rank with the same parameters"));
    }

    let machines = ranks / of_node;
    Ok(Route {
        two_level: Some(level),
        is_auto,
        text: Some(format!(
            "in two levels, within {machines} machines of {of_node} ranks and between them ({flag}; sums differ from those \
             of one ring within rounding)"
        )),
    })
}

impl Route {
    /// The number of a rank that has none, since it cannot start.
    pub(crate) const UNKNOWN: u64 = u64::MAX;

    /// The number that ranks exchange: equal routes have equal numbers.
    pub(crate) fn code(&self) -> u64 {
        let level = self.two_level.unwrap_or(0) as u64;
        level << 1 | u64::from(!self.is_auto)
    }

    /// The route that ranks with the numbers `codes` of their routes take.
    ///
    /// # Errors
    /// The routes differ, and a flag sets one.
    pub(crate) fn agreed(self, codes: &[u64]) -> Result<Self, CliError> {
        if codes.contains(&Self::UNKNOWN) {
            return Ok(self);
        }
        let Some(other) = codes.iter().position(|code| *code != codes[0]) else {
            return Ok(self);
        };
        if codes.iter().any(|code| code & 1 == 1) {
            return Err(usage!(
                "--collectives: ranks 0 and {other} have different flags, or machines with different numbers of ranks; \
                 pass the same --collectives and --ranks-per-node to all ranks"
            ));
        }
        Ok(Self {
            two_level: None,
            text: Some(
                "in one ring over all ranks (--collectives auto: machines have different numbers of ranks)"
                    .to_owned(),
            ),
            ..self
        })
    }
}

#[cfg(test)]
mod tests {
    use integration_tests::Printed;

    use zero_shard::Sharding;

    use super::*;

    fn chosen(
        requested: Collectives,
        mesh: &MeshSettings,
        ranks: usize,
        node_ranks: Option<usize>,
    ) -> Result<Route, String> {
        route(requested, mesh, ranks, node_ranks).map_err(|error| error.to_string())
    }

    fn parts(ranks: usize) -> MeshSettings {
        MeshSettings {
            tensor_ranks: Some(ranks),
            ..MeshSettings::default()
        }
    }

    #[test]
    fn machines_decide() {
        let whole = MeshSettings::default();
        let shared = MeshSettings {
            sequence_ranks: Some(4),
            ..whole
        };
        let auto = |mesh: &MeshSettings, ranks, node_ranks| {
            let route = chosen(Collectives::Auto, mesh, ranks, node_ranks).unwrap();
            assert!(route.is_auto);
            (route.two_level, route.text.unwrap_or_default())
        };

        let (level, text) = auto(&whole, 8, Some(4));
        assert_eq!(level, Some(4));
        assert!(
            text.starts_with("in two levels, within 2 machines of 4 ranks"),
            "{text}"
        );
        assert_eq!(auto(&shared, 8, Some(2)).0, Some(2));
        // Of the ranks with the same part of the parameters.
        assert_eq!(auto(&parts(2), 8, Some(4)).0, Some(2));

        for (mesh, ranks, node_ranks, why) in [
            (whole, 8, Some(1), "each machine has one rank"),
            (parts(2), 8, Some(2), "each machine has one rank"),
            (parts(4), 8, Some(2), "no whole groups of --tensor-parallel"),
            (whole, 8, None, "pass --ranks-per-node L"),
        ] {
            let (level, text) = auto(&mesh, ranks, node_ranks);
            assert_eq!(level, None, "{text}");
            text.shows(&["in one ring", why]);
        }
        // There is no other route, so nothing is printed.
        assert_eq!(auto(&whole, 8, Some(8)), (None, String::new()));
        let groups = MeshSettings {
            shard_group: Some(2),
            sharding: Sharding::Replicated,
            ..whole
        };
        assert_eq!(auto(&groups, 8, Some(4)), (None, String::new()));
    }

    #[test]
    fn flag_decides() {
        let whole = MeshSettings::default();
        let flat = chosen(Collectives::Flat, &whole, 8, Some(4)).unwrap();
        assert_eq!((flat.two_level, flat.is_auto), (None, false));
        assert!(flat.text.unwrap().contains("--collectives flat: requested"));
        let levels = chosen(Collectives::TwoLevel, &whole, 8, Some(4)).unwrap();
        assert_eq!((levels.two_level, levels.is_auto), (Some(4), false));
        let one_machine = chosen(Collectives::TwoLevel, &whole, 8, Some(8)).unwrap();
        assert_eq!(one_machine.two_level, None);
        assert!(one_machine.text.unwrap().contains("on one machine"));
    }

    #[test]
    fn refused_requests_name_the_cause() {
        let groups = |sharding| MeshSettings {
            shard_group: Some(2),
            sharding,
            ..MeshSettings::default()
        };
        for (mesh, node_ranks, expected) in [
            (
                groups(Sharding::Hybrid),
                Some(4),
                "--collectives two-level with --shard-group 2: groups already",
            ),
            (
                groups(Sharding::Secondary),
                Some(4),
                "--collectives two-level with --hpz 2: groups already",
            ),
            (
                MeshSettings::default(),
                None,
                "--collectives two-level: the launcher passes no number",
            ),
            (
                parts(4),
                Some(2),
                "--collectives two-level with --tensor-parallel 4 on machines of 2 ranks: expected",
            ),
        ] {
            let error = chosen(Collectives::TwoLevel, &mesh, 8, node_ranks).unwrap_err();
            assert!(error.starts_with(expected), "{error}");
        }
    }

    /// Machines of 4 and 2 ranks: 2 divides the 6 ranks, and 4 does not.
    #[test]
    fn ranks_of_uneven_machines_agree_on_one_ring() {
        let of = |requested, node_ranks| {
            chosen(requested, &MeshSettings::default(), 6, node_ranks).unwrap()
        };
        let auto = [None, Some(2)].map(|of_node| of(Collectives::Auto, of_node));
        let codes = [0, 0, 0, 0, 1, 1].map(|rank: usize| auto[rank].code());
        for route in auto.clone() {
            let agreed = route.agreed(&codes).unwrap();
            assert_eq!(agreed.two_level, None);
            assert!(agreed.text.unwrap().contains("different numbers of ranks"));
        }
        let failed = [auto[1].code(), Route::UNKNOWN];
        assert_eq!(auto[1].clone().agreed(&failed).unwrap(), auto[1]);
        let same = [auto[1].code(); 6];
        assert_eq!(auto[1].clone().agreed(&same).unwrap(), auto[1]);

        // A flag of one rank only.
        let flat = of(Collectives::Flat, None);
        let codes = [flat.code(), auto[1].code()];
        let error = auto[1].clone().agreed(&codes).unwrap_err().to_string();
        assert!(
            error.starts_with("--collectives: ranks 0 and 1 have different flags"),
            "{error}"
        );
    }
}
