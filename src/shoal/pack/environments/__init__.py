"""Environments that travel: what a machine needs to build the Python environment of its agent.

Theory of operation
-------------------
A machine of a pool may have nothing but Python. If the pool names an `environment`, the coordinator publishes a recipe,
and the machine builds the environment from it before the agent starts (`pack/remote`).

What is published. An environment is a requirements file, a `pylock.toml`, a packed environment (a tar archive), a
`.pex` file, or `"shoal"` for Shoal alone. `recipe.publish` stores all files that the machine will need as blobs under
their hashes: the file itself and the files that it refers to on this disk (`requirements`), a wheel of the Shoal that
runs here and, for requirements, one of pip (`wheel`). The recipe lists their hashes and is a blob too. So an
environment is known by two hashes, that of Shoal's wheel and that of the recipe, and these are all that the agent's
script has to name.

Identity. `made_of` is the hash of everything the built environment depends on; the machine adds its own architecture, C
library and Python and uses the result as the key of its cache. Publishing the same environment twice gives the same
hashes, because wheels are built byte for byte the same. A new version of Shoal changes the key of installed
environments but not of archives and `.pex` files, which get Shoal beside them.

Limits. Directories of this disk (`-e .`, `./lib`) cannot be sent and are refused with BadEnvironment (S440); wheels and
source archives can. Packages come from the index that the file or the machine's pip configuration names.

May import: shoal.errors, the rest of shoal.pack, msgspec.
"""
