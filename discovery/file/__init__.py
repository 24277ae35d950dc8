"""The registry in a shared folder, for hosts without etcd.

| module | subject |
|---|---|
| registry | `FileRegistry` |
| folder | the folder itself: each operation in a thread, with a deadline; which files are still kept up to date |
| registration | one worker's file; small ids, a file each |
| watch | all workers' files |

A process touches its file several times in each lease. A reader measures on its own clock how long a file has not
changed, so the clocks of the hosts may differ.
"""

from discovery.file.registry import FileRegistry

__all__ = ["FileRegistry"]
