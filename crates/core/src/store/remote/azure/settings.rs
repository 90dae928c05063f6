//! How Azure Blob Storage is asked.

use crate::store::remote::secret::Secret;

/// How Azure Blob Storage is asked. What is left out is looked for where the tools of Azure do.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct AzureSettings {
    /// `http://` or `https://`, a host, and for emulators the account as path: where the containers are.
    pub endpoint: Option<String>,
    /// Requests carry neither signature nor token.
    pub anonymous: bool,
    /// The storage account.
    pub account_name: Option<String>,
    /// Its key.
    pub account_key: Option<Secret>,
    /// A shared access signature, instead of a key.
    pub sas_token: Option<Secret>,
}
