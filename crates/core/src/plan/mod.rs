//! The plan of a load: from a request to a layout, a routing and a schedule.

mod holes;
pub mod layout;
pub mod lists;
pub mod packed;
pub(crate) mod planned;
mod recorded;
pub mod request;
mod routing;
pub mod schedule;
pub mod shares;
pub mod strides;
mod survey;
pub mod traffic;
pub mod want;

pub(crate) use planned::Planned;
pub use planned::{is_resident, missing_where_mappable};
