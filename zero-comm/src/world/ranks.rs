//! This process's rank, from the environment variables of torchrun, Open MPI and Slurm.
//!
//! | | torchrun, or set by hand | Open MPI | Slurm (`srun`) |
//! |---|---|---|---|
//! | rank | `RANK` | `OMPI_COMM_WORLD_RANK` | `SLURM_PROCID` |
//! | world size | `WORLD_SIZE` | `OMPI_COMM_WORLD_SIZE` | `SLURM_STEP_NUM_TASKS` |
//! | local rank | `LOCAL_RANK` | `OMPI_COMM_WORLD_LOCAL_RANK` | `SLURM_LOCALID` |
//! | host of rank 0 | `MASTER_ADDR` | `MASTER_ADDR`, or this machine if it has all ranks | `MASTER_ADDR`, or the step's first node |
//! | port | `MASTER_PORT` | `MASTER_PORT`, or derived from the job's name | `MASTER_PORT`, or derived from the job's number |
//! | one machine | `LOCAL_WORLD_SIZE` is `WORLD_SIZE` | `OMPI_COMM_WORLD_LOCAL_SIZE` is `OMPI_COMM_WORLD_SIZE` | `SLURM_STEP_NUM_NODES` is 1 |
//! | token | `ZERO_TOKEN` | `ZERO_TOKEN`, with `mpirun -x ZERO_TOKEN` | `ZERO_TOKEN`, which `srun` exports |
//!
//! All ranks are also on one machine if rank 0's host is a loopback address or `localhost`, or if
//! there is one rank. They then meet at a loopback address, and need no token. Ranks on several
//! machines do:
//!
//! ```sh
//! export ZERO_TOKEN=$(openssl rand -hex 16)    # on one machine; set the same value on the others
//! ```
//!
//! Only processes with the token join the world and receive NCCL's unique id. With
//! `ZERO_TOKEN=none`, every process that reaches rank 0's port can. `zero train` makes a token for
//! the ranks that it starts.
//!
//! Slurm also sets `SLURM_NTASKS` and `SLURM_PROCID` in a batch script, which is not a rank; only
//! `srun` sets the variables of a *step*. A step of one task does not count as a launch. If
//! `TORCHELASTIC_USE_AGENT_STORE` is true, torchrun's agent listens at `MASTER_PORT`, and rank 0
//! uses the next port.

use std::fmt;
use std::net::IpAddr;

use super::error::LaunchError;
use super::fnv::Fnv;

/// The program that started the processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Launcher {
    /// torchrun, `zero train`, or any other program that sets `RANK` and `WORLD_SIZE`.
    Torchrun,
    /// `mpirun` of Open MPI.
    OpenMpi,
    /// `srun`.
    Slurm,
}

/// This process's place in the world that a launcher started.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Ranks {
    /// This process's rank.
    pub rank: usize,
    /// The number of ranks.
    pub world_size: usize,
    /// This process's rank among those of its machine, which selects its GPU.
    pub local_rank: usize,
    /// The name or address of rank 0's machine.
    pub host: String,
    /// The port at which rank 0 listens.
    pub port: u16,
    /// The program that set the variables.
    pub launcher: Launcher,
    /// Whether all ranks are on this machine. They then connect over its loopback interface,
    /// whatever `host` is.
    pub one_machine: bool,
    /// The secret that the ranks share. Required if they are on several machines.
    pub token: Option<Token>,
}

impl Ranks {
    /// Rank `rank` of `world_size`, the `local_rank`-th of its machine; rank 0 listens at `port` of
    /// `host`. The ranks may be on several machines, so they need a [`token`](Self::token) or
    /// [`one_machine`](Self::one_machine).
    pub fn new(
        rank: usize,
        world_size: usize,
        local_rank: usize,
        host: impl Into<String>,
        port: u16,
    ) -> Self {
        let host = host.into();
        let launcher = Launcher::Torchrun;
        Self {
            rank,
            world_size,
            local_rank,
            host,
            port,
            launcher,
            one_machine: false,
            token: None,
        }
    }
}
zero_alloc::setters!(Ranks { launcher: Launcher, one_machine: bool, token: Option<Token> });

/// A secret that all ranks of a job share. Only processes that know it can join the world. Its
/// `Debug` output does not contain it.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(Vec<u8>);

impl Token {
    /// Shortest secret, in bytes: whoever sees the handshake on the network could guess a shorter
    /// one.
    const MIN_BYTES: usize = 16;

    /// The token with this secret. `none` lets every process that reaches rank 0's port join.
    ///
    /// # Errors
    /// The secret has less than 16 bytes.
    pub fn new(secret: &str) -> Result<Self, LaunchError> {
        match secret.trim() {
            "none" => Ok(Self(Vec::new())),
            short if short.len() < Self::MIN_BYTES => {
                Err(LaunchError::ShortToken { len: short.len() })
            }
            secret => Ok(Self(secret.as_bytes().to_vec())),
        }
    }

    /// A new random token.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub fn random() -> std::io::Result<Self> {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes).map_err(std::io::Error::other)?;
        Ok(Self(
            bytes
                .iter()
                .flat_map(|byte| format!("{byte:02x}").into_bytes())
                .collect(),
        ))
    }

    /// The value of `ZERO_TOKEN` for the processes of the job. Keep it out of command lines and
    /// logs.
    pub fn to_variable(&self) -> String {
        if self.0.is_empty() {
            "none".to_owned()
        } else {
            String::from_utf8_lossy(&self.0).into_owned()
        }
    }

    pub(crate) fn secret(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_empty() {
            "Token(none)"
        } else {
            "Token(secret)"
        })
    }
}

/// The variable of the token.
const TOKEN: &str = "ZERO_TOKEN";

/// The range of derived ports: above the ports of services, below the ephemeral ports of outgoing
/// connections.
const DERIVED_PORTS: std::ops::Range<u16> = 20_000..30_000;

/// The lookup of a variable.
struct Variables<F>(F);

impl<F: Fn(&'static str) -> Option<String>> Variables<F> {
    fn text(&self, name: &'static str) -> Option<String> {
        (self.0)(name).filter(|value| !value.is_empty())
    }

    fn number<T: std::str::FromStr>(
        &self,
        name: &'static str,
        expected: &'static str,
    ) -> Result<Option<T>, LaunchError> {
        let Some(value) = self.text(name) else {
            return Ok(None);
        };
        value
            .trim()
            .parse()
            .map(Some)
            .map_err(|_| LaunchError::Value {
                variable: name,
                value,
                expected,
            })
    }

    /// Checks that no variable of a Slurm step is set, where the number of its tasks is not. A
    /// batch script is process 0 of no step.
    fn check_no_step(&self) -> Result<(), LaunchError> {
        let process = self.number::<usize>("SLURM_PROCID", "a number")?;
        let is_task = process.is_some_and(|process| process > 0);
        let others = ["SLURM_STEP_ID", "SLURM_STEP_NODELIST"];
        let set = others.into_iter().find(|name| self.text(name).is_some());
        let present = if is_task { Some("SLURM_PROCID") } else { set };
        match present {
            Some(present) => Err(LaunchError::Missing {
                present,
                missing: "SLURM_STEP_NUM_TASKS",
            }),
            None => Ok(()),
        }
    }

    /// Checks that the ranks of a machine are among all, and the local rank among them.
    fn check_machine(
        &self,
        size_name: &'static str,
        local_name: &'static str,
        local_size_name: &'static str,
    ) -> Result<(), LaunchError> {
        let number = |name| self.number::<usize>(name, "a number");
        let Some(local_size) = number(local_size_name)? else {
            return Ok(());
        };
        if let Some(local) = number(local_name)?.filter(|local| *local >= local_size) {
            return Err(LaunchError::Contradiction {
                variable: local_name,
                value: local,
                limit_variable: local_size_name,
                limit: local_size,
            });
        }
        if let Some(size) = number(size_name)?.filter(|size| *size < local_size) {
            return Err(LaunchError::Contradiction {
                variable: local_size_name,
                value: local_size,
                limit_variable: size_name,
                limit: size,
            });
        }
        Ok(())
    }

    /// Reads the variables of rank, world size and local rank with these names. `host` and `port`
    /// are the defaults of `MASTER_ADDR` and `MASTER_PORT`. `all_here`: whether the launcher placed
    /// all ranks on this machine; `None` if it does not say, and then a loopback address decides.
    fn world(
        &self,
        launcher: Launcher,
        [rank_name, size_name, local_name]: [&'static str; 3],
        host: Option<String>,
        port: Option<u16>,
        all_here: Option<bool>,
    ) -> Result<Ranks, LaunchError> {
        let present = if self.text(rank_name).is_some() {
            rank_name
        } else {
            size_name
        };

        let missing = |missing| LaunchError::Missing { present, missing };
        let need = |name| self.number(name, "a number")?.ok_or(missing(name));
        let (rank, world_size): (usize, usize) = (need(rank_name)?, need(size_name)?);
        if rank >= world_size {
            return Err(LaunchError::Rank {
                variable: rank_name,
                rank,
                world_size,
            });
        }

        // Without a local rank, all ranks are assumed to be on this machine.
        let local_rank = self.number(local_name, "a number")?.unwrap_or(rank);
        let host = self
            .text("MASTER_ADDR")
            .or(host)
            .ok_or(missing("MASTER_ADDR"))?;
        let master_port = self.number("MASTER_PORT", "a port, 1 to 65535")?;
        let port = master_port.or(port).ok_or(missing("MASTER_PORT"))?;
        let one_machine = world_size == 1 || all_here.unwrap_or_else(|| is_loopback(&host));
        let token = self
            .text(TOKEN)
            .map(|secret| Token::new(&secret))
            .transpose()?;

        Ok(Ranks {
            rank,
            world_size,
            local_rank,
            host,
            port,
            launcher,
            one_machine,
            token,
        })
    }
}

impl Ranks {
    /// Reads this process's rank from the environment; `None` if no launcher has set the variables.
    ///
    /// # Errors
    /// The variables are inconsistent.
    pub fn from_env() -> Result<Option<Self>, LaunchError> {
        // A token that is not UTF-8 is still one, the same on all ranks.
        Self::parse(|name| Some(std::env::var_os(name)?.to_string_lossy().into_owned()))
    }

    /// Like [`from_env`](Self::from_env), with `variable` to look up a variable.
    ///
    /// # Errors
    /// The variables are inconsistent.
    pub fn parse(
        variable: impl Fn(&'static str) -> Option<String>,
    ) -> Result<Option<Self>, LaunchError> {
        let vars = Variables(variable);
        let text = |name| vars.text(name).unwrap_or_default();
        if vars.text("RANK").is_some() || vars.text("WORLD_SIZE").is_some() {
            let names = ["RANK", "WORLD_SIZE", "LOCAL_RANK"];
            vars.check_machine("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")?;
            let all_here = vars
                .text("LOCAL_WORLD_SIZE")
                .map(|local| Some(local) == vars.text("WORLD_SIZE"));
            let mut ranks = vars.world(Launcher::Torchrun, names, None, None, all_here)?;
            if text("TORCHELASTIC_USE_AGENT_STORE").eq_ignore_ascii_case("true") {
                ranks.port = ranks.port.checked_add(1).unwrap_or(u16::MAX - 1);
            }
            return Ok(Some(ranks));
        }

        if vars.text("OMPI_COMM_WORLD_RANK").is_some()
            || vars.text("OMPI_COMM_WORLD_SIZE").is_some()
        {
            let names = [
                "OMPI_COMM_WORLD_RANK",
                "OMPI_COMM_WORLD_SIZE",
                "OMPI_COMM_WORLD_LOCAL_RANK",
            ];
            vars.check_machine(names[1], names[2], "OMPI_COMM_WORLD_LOCAL_SIZE")?;
            let all_here =
                vars.text("OMPI_COMM_WORLD_LOCAL_SIZE") == vars.text("OMPI_COMM_WORLD_SIZE");
            let host = all_here.then(|| "127.0.0.1".to_owned());
            let port = derived_port(&text("PMIX_NAMESPACE"));
            return vars
                .world(Launcher::OpenMpi, names, host, Some(port), Some(all_here))
                .map(Some);
        }

        let tasks = vars.number::<usize>("SLURM_STEP_NUM_TASKS", "a number")?;
        if tasks.is_none() {
            vars.check_no_step()?;
        }
        if tasks.is_some_and(|tasks| tasks != 1) {
            let names = ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"];
            let port = derived_port(&format!(
                "{}.{}",
                text("SLURM_JOB_ID"),
                text("SLURM_STEP_ID")
            ));
            let host = first_node(&text("SLURM_STEP_NODELIST"));
            let all_here = text("SLURM_STEP_NUM_NODES") == "1";
            return vars
                .world(Launcher::Slurm, names, host, Some(port), Some(all_here))
                .map(Some);
        }

        Ok(None)
    }
}

/// Whether `host` names a loopback address, whatever the resolver says.
fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse().is_ok_and(|ip: IpAddr| ip.is_loopback())
}

/// Derives a port from a job's name: equal in all its processes, rarely equal for two
/// jobs.
fn derived_port(job: &str) -> u16 {
    let mut hash = Fnv::default();
    hash.extend(job.bytes());
    DERIVED_PORTS.start + (hash.0 % DERIVED_PORTS.len() as u64) as u16
}

/// The first node of a Slurm node list: `n1` of `n1,n2`, `rack-07` of `rack-[07-09,12],other`.
fn first_node(list: &str) -> Option<String> {
    let end = |text: &str, ends: &[char]| text.find(ends).unwrap_or(text.len());
    let Some(open) = list.find('[').filter(|&open| open < end(list, &[','])) else {
        let name = &list[..end(list, &[','])];
        return (!name.is_empty()).then(|| name.to_owned());
    };
    let (close, inside) = (list.find(']')?, list.get(open + 1..)?);
    let tail = &list[close + 1..];
    let tail = &tail[..end(tail, &[','])];
    // The name may contain a second bracket.
    let tail = if tail.contains('[') {
        first_node(tail)?
    } else {
        tail.to_owned()
    };
    Some(format!(
        "{}{}{tail}",
        &list[..open],
        &inside[..end(inside, &['-', ',', ']'])]
    ))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(variables: &[(&str, &str)]) -> Result<Option<Ranks>, LaunchError> {
        Ranks::parse(|name| {
            // A later value of a variable replaces an earlier one.
            let mut values = variables.iter().rev();
            let (_, value) = values.find(|(n, _)| *n == name)?;
            Some((*value).to_owned())
        })
    }

    const TORCHRUN: &str = "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 MASTER_ADDR=node-0 MASTER_PORT=29500";
    const OPEN_MPI: &str = "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=3 \
        OMPI_COMM_WORLD_LOCAL_SIZE=4";
    const SLURM: &str = "SLURM_PROCID=2 SLURM_STEP_NUM_TASKS=16 SLURM_LOCALID=2 \
        SLURM_STEP_NODELIST=gpu-[007-009,12],big SLURM_JOB_ID=4711 SLURM_STEP_ID=0";
    const SECRET: &str = "0123456789abcdef";

    /// The `variables`, separated by spaces.
    fn split(variables: &str) -> Vec<(&str, &str)> {
        variables
            .split(' ')
            .filter_map(|variable| variable.split_once('='))
            .collect()
    }

    #[test]
    fn variables_of_each_launcher() {
        let all = [TORCHRUN, OPEN_MPI, SLURM].join(" ");
        let agent = format!("{TORCHRUN} TORCHELASTIC_USE_AGENT_STORE=True");
        let spread = "OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 MASTER_ADDR=a";
        let spread = format!("{OPEN_MPI} {spread}");
        for (variables, launcher, place, host, port) in [
            (
                TORCHRUN,
                Launcher::Torchrun,
                [5, 8, 1],
                "node-0",
                Some(29500),
            ),
            // They take precedence over Open MPI's and Slurm's.
            (&all, Launcher::Torchrun, [5, 8, 1], "node-0", Some(29500)),
            // The agent listens at the port.
            (&agent, Launcher::Torchrun, [5, 8, 1], "node-0", Some(29501)),
            (OPEN_MPI, Launcher::OpenMpi, [3, 4, 3], "127.0.0.1", None),
            (&spread, Launcher::OpenMpi, [3, 4, 1], "a", None),
            (SLURM, Launcher::Slurm, [2, 16, 2], "gpu-007", None),
        ] {
            let ranks = parse(&split(variables)).unwrap().unwrap();
            let seen = [ranks.rank, ranks.world_size, ranks.local_rank];
            assert_eq!((ranks.launcher, seen), (launcher, place), "{variables}");
            assert_eq!(ranks.host, host, "{variables}");
            let is_derived = DERIVED_PORTS.contains(&ranks.port);
            assert!(port.map_or(is_derived, |port| port == ranks.port));
        }

        let port = |job: &str| {
            let variables = format!("{SLURM} SLURM_JOB_ID={job}");
            parse(&split(&variables)).unwrap().unwrap().port
        };
        assert_ne!(port("4711"), port("4712"));
        // Neither a batch script nor a step of one task is a rank.
        let one_task = format!("{SLURM} SLURM_STEP_NUM_TASKS=1");
        for variables in ["", "SLURM_PROCID=0 SLURM_NTASKS=16", &one_task] {
            assert_eq!(parse(&split(variables)), Ok(None));
        }
    }

    /// Variables that are half set, contradict each other or have no value, with the message. An
    /// empty value is as if the variable were not set.
    #[test]
    fn wrong_variables_are_named() {
        for (launcher, change, expected) in [
            (TORCHRUN, "WORLD_SIZE=", "RANK is set, but WORLD_SIZE"),
            (TORCHRUN, "RANK=", "WORLD_SIZE is set, but RANK"),
            (TORCHRUN, "MASTER_ADDR=", "MASTER_ADDR is not"),
            (TORCHRUN, "MASTER_PORT=", "MASTER_PORT is not"),
            (TORCHRUN, "MASTER_PORT=70000", "MASTER_PORT=70000: expected"),
            (TORCHRUN, "WORLD_SIZE=5", "RANK=5, but there are 5"),
            (TORCHRUN, "WORLD_SIZE=0", "RANK=5, but there are 0"),
            (TORCHRUN, "WORLD_SIZE=two", "WORLD_SIZE=two: expected"),
            (TORCHRUN, "RANK=-1", "RANK=-1: expected a number"),
            (TORCHRUN, "LOCAL_RANK=x", "LOCAL_RANK=x: expected"),
            (
                TORCHRUN,
                "LOCAL_WORLD_SIZE=x",
                "LOCAL_WORLD_SIZE=x: expected",
            ),
            (
                TORCHRUN,
                "LOCAL_WORLD_SIZE=1",
                "LOCAL_RANK=1 contradicts LOCAL_WORLD_SIZE=1",
            ),
            (
                TORCHRUN,
                "LOCAL_WORLD_SIZE=9",
                "LOCAL_WORLD_SIZE=9 contradicts WORLD_SIZE=8",
            ),
            (
                OPEN_MPI,
                "OMPI_COMM_WORLD_RANK=",
                "OMPI_COMM_WORLD_SIZE is set, but OMPI_COMM_WORLD_RANK",
            ),
            (
                OPEN_MPI,
                "OMPI_COMM_WORLD_SIZE=",
                "OMPI_COMM_WORLD_RANK is set, but OMPI_COMM_WORLD_SIZE",
            ),
            (
                OPEN_MPI,
                "OMPI_COMM_WORLD_LOCAL_SIZE=2",
                "OMPI_COMM_WORLD_LOCAL_RANK=3 contradicts OMPI_COMM_WORLD_LOCAL_SIZE=2",
            ),
            // On several machines, the address of rank 0 must be set.
            (
                OPEN_MPI,
                "OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1",
                "OMPI_COMM_WORLD_RANK is set, but MASTER_ADDR is not",
            ),
            (SLURM, "SLURM_PROCID=", "SLURM_PROCID is not"),
            (
                SLURM,
                "SLURM_STEP_NUM_TASKS=",
                "SLURM_STEP_NUM_TASKS is not",
            ),
            (
                SLURM,
                "SLURM_STEP_NUM_TASKS=two",
                "SLURM_STEP_NUM_TASKS=two",
            ),
            (SLURM, "SLURM_STEP_NUM_TASKS=0", "there are 0 ranks"),
            ("SLURM_PROCID=1", "", "SLURM_STEP_NUM_TASKS is not"),
            ("SLURM_STEP_ID=0", "", "SLURM_STEP_NUM_TASKS is not"),
        ] {
            let variables = format!("{launcher} {change}");
            let error = parse(&split(&variables)).unwrap_err().to_string();
            assert!(error.contains(expected), "{variables}: {error}");
        }
    }

    #[test]
    fn machines_of_the_ranks() {
        let spread = "OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 MASTER_ADDR=a";
        for (launcher, change, expected) in [
            (TORCHRUN, "", false),
            (TORCHRUN, "LOCAL_WORLD_SIZE=8", true),
            (TORCHRUN, "LOCAL_WORLD_SIZE=4", false),
            (TORCHRUN, "LOCAL_WORLD_SIZE=", false),
            (TORCHRUN, "MASTER_ADDR=127.0.0.1", true),
            (TORCHRUN, "MASTER_ADDR=::1", true),
            (TORCHRUN, "MASTER_ADDR=localhost", true),
            (TORCHRUN, "MASTER_ADDR=10.0.0.1", false),
            (TORCHRUN, "WORLD_SIZE=1 RANK=0", true),
            // On the master alone, some operators set a loopback name.
            (TORCHRUN, "LOCAL_WORLD_SIZE=4 MASTER_ADDR=localhost", false),
            (OPEN_MPI, "", true),
            (OPEN_MPI, spread, false),
            (SLURM, "", false),
            (SLURM, "SLURM_STEP_NUM_NODES=2", false),
            (SLURM, "SLURM_STEP_NUM_NODES=1", true),
        ] {
            let variables = format!("{launcher} {change}");
            let ranks = parse(&split(&variables)).unwrap().unwrap();
            assert_eq!(ranks.one_machine, expected, "{variables}");
        }
    }

    #[test]
    fn token_is_never_printed() {
        let with = |secret: &str| parse(&split(&format!("{TORCHRUN} {TOKEN}={secret}")));
        let ranks = with(SECRET).unwrap().unwrap();
        assert_eq!(ranks.token, Some(Token::new(SECRET).unwrap()));
        assert_eq!(
            ranks.token.as_ref().map(Token::to_variable).as_deref(),
            Some(SECRET)
        );
        assert!(!format!("{ranks:?}").contains(SECRET), "{ranks:?}");
        let short = with("hunter2").unwrap_err();
        assert_eq!(short, LaunchError::ShortToken { len: 7 });
        assert!(!short.to_string().contains("hunter2"), "{short}");
        let open = Token::new("none").unwrap();
        assert_eq!(
            (open.secret(), open.to_variable().as_str()),
            (&[][..], "none")
        );
        let random = [Token::random().unwrap(), Token::random().unwrap()];
        assert_ne!(random[0], random[1]);
        assert_eq!(
            Token::new(&random[0].to_variable()).as_ref(),
            Ok(&random[0])
        );
    }

    #[test]
    fn node_lists() {
        let cases = [
            ("n1", "n1"),
            ("n1,n2", "n1"),
            ("r-[07-09,12],x", "r-07"),
            ("a[1,2]b,c", "a1b"),
            ("x,a[1-2]", "x"),
        ];
        for (list, first) in cases.into_iter().chain([("a[1-2]b[3-4]", "a1b3")]) {
            assert_eq!(first_node(list).as_deref(), Some(first), "{list}");
        }
        assert_eq!(first_node(""), None);
        assert_eq!(first_node("a[1-2"), None);
    }

    proptest! {
        #[test]
        fn arbitrary_node_lists_never_panic(list in "[a-c0-2\\[\\],-]{0,12}") {
            if let Some(node) = first_node(&list) {
                prop_assert!(!node.contains(','), "{node}");
            }
        }
    }
}
