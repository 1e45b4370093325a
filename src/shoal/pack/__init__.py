"""Code and environments that travel with a run: the user's function, files and modules, and the project's files.

Theory of operation
-------------------
A run needs three things on the machines of its members besides Shoal: the user's code, the files that it reads, and
installed packages. This folder describes the first two; `environments` describes the third, and `remote` builds it on
the machine.

Content addressing. Every file is stored under the SHA-256 of its contents, and lists of files map names to hashes. The
same contents are stored and sent once, a receiver can say which hashes it lacks, and checking a file needs nothing but
its name. There are two such lists. A `Project` is the directory of a script: `shoal run` sends it to machines that do
not see this disk, and the hash of the list names the whole project. A `PackManifest` belongs to `shoal.run`: it names
one function, the files of `files=`, and the modules that only the user's machine can import.

Signatures. A manifest is signed with HMAC-SHA-256 under the token of its run. The signature covers the manifest, the
manifest covers the hashes, and the hashes cover the contents; so a file cannot be replaced without the token. Members
verify all three before they use anything: `manifest.read` the signature, `manifest.get_bytes` and `files.verify` the
hashes. A mismatch raises PackDamaged (S530).

Unpickling. A function that members can import travels as a module and a name. Any other, such as one from a notebook,
is pickled by value with cloudpickle. `function` holds the only `pickle.loads` in Shoal, and it runs only on bytes whose
hash stands in a signed manifest. A holder of the token may run code on the members anyway, so this grants nothing new.
Pickled code works in the same Python version only, so the manifest records it and others are refused.

Writing. Blobs and project directories are written under a temporary name and then renamed, so readers see either
nothing or the whole. Paths from a list are checked before use: they cannot leave their directory.

The modules: `manifest` (signed lists and blobs), `function`, `files` (`files=`), `modules` (what only this machine can
import), `project` (the directory of a script).

May import: shoal.errors, msgspec.
"""
