//! Adapter names that come from requests, as paths that can't leave a root.

use std::path::{Component, Path, PathBuf};

use crate::error::{Error, Result};

/// Longest name in bytes.
const MAX_NAME: usize = 1024;

/// The directory `name` under `root`: sub-folders are allowed, everything that leads out is not, a
/// symbolic link included.
///
/// # Errors
/// [`Error::Escape`] for an absolute name, one with `..`, a NUL or a drive, one longer than 1,024 bytes,
/// or one whose directory really lies elsewhere; [`Error::Io`] when there is none.
pub fn confine(root: &Path, name: &str) -> Result<PathBuf> {
    let escape = |why: &'static str| Error::Escape { name: name.chars().take(80).collect(), why };
    if name.is_empty() || name.len() > MAX_NAME {
        return Err(escape("a name has 1 to 1024 bytes"));
    }
    if name.contains('\0') {
        return Err(escape("a name has no NUL"));
    }
    // A backslash separates folders on some systems and is part of a name on others: neither is wanted.
    if name.contains('\\') {
        return Err(escape("a name has no backslash"));
    }
    let relative = Path::new(name);
    if !relative.components().all(|part| matches!(part, Component::Normal(_))) {
        return Err(escape("a name is a relative path without . and .."));
    }
    let real =
        |path: &Path| path.canonicalize().map_err(|source| Error::Io { path: path.display().to_string(), source });
    let (root, dir) = (real(root)?, real(&root.join(relative))?);
    match dir.starts_with(&root) {
        true => Ok(dir),
        false => Err(escape("its directory lies outside of the root")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_leads_to_a_folder_below_the_root_and_nowhere_else() {
        let home = tempfile::tempdir().unwrap();
        let root = home.path().join("adapters");
        std::fs::create_dir_all(root.join("team/one")).unwrap();
        std::fs::create_dir_all(home.path().join("secret")).unwrap();
        assert!(confine(&root, "team/one").unwrap().ends_with("team/one"));
        let long = "a".repeat(4096);
        for bad in ["", "../secret", "team/../../secret", "/etc", "./team", "team\0", "..\\secret", long.as_str()] {
            assert_eq!(confine(&root, bad).unwrap_err().code(), "E_PATH_ESCAPE", "{bad:?}");
        }
        assert_eq!(confine(&root, "nobody").unwrap_err().code(), "E_IO");
        #[cfg(unix)]
        {
            std::os::unix::fs::symlink(home.path().join("secret"), root.join("link")).unwrap();
            assert_eq!(confine(&root, "link").unwrap_err().code(), "E_PATH_ESCAPE");
            std::os::unix::fs::symlink(root.join("team/one"), root.join("inside")).unwrap();
            assert!(confine(&root, "inside").is_ok());
        }
    }
}
