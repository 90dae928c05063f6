//! Measures clients of web servers: a server with a link model, and the least that receiving costs.
//!
//! ```text
//! netbench serve FOLDER [--bind HOST:PORT] [--certificate PEM --key PEM] [--rate-per-connection BYTES_PER_S]
//!     [--first-byte MS] [--most-connections N [--over wait|refuse]] [--stall-percent P] [--seed N]
//! netbench receive URL... [--connections N] [--request BYTES] [--memory fresh|huge|touched] [--authority PEM]
//!     [--tls unbuffered|buffered] [--threads N]
//! ```
//!
//! `serve` answers ranged requests over the files of a folder, and counts. It prints its port, and its counts on
//! SIGTERM; `GET /_counts` gives them at any time. `receive` fetches whole files into memory and checks nothing except
//! the lengths: no client can do with less.

mod arguments;
mod file;
mod link;
mod memory;
mod receive;
mod serve;
mod stream;
mod tls;
mod wire;

use arguments::Arguments;

fn main() {
    let mut arguments = std::env::args().skip(1);
    let command = arguments.next().unwrap_or_default();
    let done = Arguments::parse(arguments).and_then(|arguments| match command.as_str() {
        "serve" => serve::serve(&arguments),
        "receive" => receive::receive(&arguments),
        other => Err(format!("no such command: {other:?} (there are serve and receive)")),
    });
    if let Err(e) = done {
        eprintln!("netbench {command}: {e}");
        std::process::exit(1);
    }
}
