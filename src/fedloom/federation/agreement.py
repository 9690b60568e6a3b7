"""What the members of a federation agree on (FEDERATION.toml), and what a site says of itself (SITE.toml).

Every member has the same FEDERATION.toml. Server and sites compare a digest of it with each message, so none of them can run other
settings than the rest without being noticed. Paths and machines are each member's own matter and not part of it.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from fedloom import config
from fedloom.config import RunSettings, Settings
from fedloom.core.errors import DamagedRun, InvalidConfig, printable
from fedloom.core.hardware import HardwareSettings
from fedloom.core.machine import DEVICES
from fedloom.core.reading import parse_json
from fedloom.core.settings import setting
from fedloom.data.images import class_name, confused, confusion
from fedloom.data.members import blank, unlabelled
from fedloom.data.readers import Dataset
from fedloom.engine.base import ENGINES
from fedloom.engine.store import FEDERATION
from fedloom.files import read_plain, write_file
from fedloom.spaces.budget import BudgetSettings

ADDRESS = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")  # a folder and a file are named after a site

SPELT = str.maketrans({"ä": "ae", "ö": "oe", "ü": "ue", "Ä": "Ae", "Ö": "Oe", "Ü": "Ue", "ß": "ss", "ø": "o", "ł": "l"})
FINGERPRINT = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Members:
    """The table [federation]."""

    name: str = setting("", "name of the federation")
    sites: tuple[str, ...] = setting((), "names of the members' sites")
    classes: tuple[str, ...] = setting((), "names of all classes; a site keeps its images in folders with these names")
    images: tuple[int, ...] = setting(
        (), "most training images that each site may claim, in the order of sites; empty: server.round.outlier is the limit", low=1
    )
    keys: tuple[str, ...] = setting(
        (), "fingerprint of each site's public key (SHA-256), in the order of sites; needed by privacy.secure, printed by `fedloom certs`"
    )


@dataclass(frozen=True)
class RoundSettings:
    """When a round is over, and what a report may be."""

    minimum: int = setting(0, "fewest reports that end a round; 0: one from every site that was asked", low=0)
    timeout: float = setting(3600.0, "seconds a site may take to answer", low=1)
    patience: float = setting(30.0, "seconds to wait for sites that are not connected, after the others have answered", low=0)
    message_mb: int = setting(256, "largest report in megabytes", low=1, high=4096)
    norm: float = setting(10.0, "longest update, in lengths of the weights (Euclidean norm); 0: no check", low=0)
    outlier: float = setting(
        10.0,
        "most that a report's update, step counts and images may be, in medians of its round (three reports or more); 0: no check",
        low=0,
    )

    @property
    def most(self) -> int:
        return self.message_mb << 20


@dataclass(frozen=True)
class ServerSettings:
    """The table [server], which only the server reads; paths are relative to the file."""

    address: str = setting("127.0.0.1:9092", "HOST:PORT where sites reach the server; 0.0.0.0:PORT listens on every network of the machine")
    certificate: str = setting("server.pem", "the server's certificate, signed by the sites' authority", path=True)
    key: str = setting("server-key.pem", "private key of the certificate", path=True)
    sites: str = setting("sites", "folder with the public key of every site, SITE.pub", path=True)
    folder: str = setting("", "folder of the run; empty: runs/NAME, with the federation's name", path=True)
    round: RoundSettings = field(default_factory=RoundSettings)


@dataclass(frozen=True)
class Agreement:
    members: Members
    settings: Settings
    server: ServerSettings
    digest: str

    @property
    def claims(self) -> dict[str, int]:
        """site -> most training images that it may claim, where that was agreed on."""
        return dict(zip(self.members.sites, self.members.images, strict=bool(self.members.images)))

    @property
    def fingerprints(self) -> dict[str, str]:
        """site -> SHA-256 of its public key, where that was agreed on."""
        return dict(zip(self.members.sites, self.members.keys, strict=bool(self.members.keys)))

    @property
    def sites(self) -> list[str]:
        """In the order in which a simulation numbers them."""
        return sorted(self.members.sites)

    def images(self, serving: bool = False) -> Dataset:
        """What is known of the images without having any; a server has its own, without labels, if data.server says where."""
        data = self.settings.data
        known = blank(self.members.classes, data.image_size)
        return replace(known, server=unlabelled(Path(data.server), data.image_size)) if serving and data.server else known


@dataclass(frozen=True)
class SiteBudget:
    """The table [budget] of SITE.toml: limits of this site alone, below those of its tier. They never leave it."""

    parameters: float = setting(0.0, "most parameters of this site's network; 0: no limit", low=0)
    macs: float = setting(0.0, "most multiply-accumulates of this site's network for one image; 0: no limit", low=0)
    memory_mb: float = setting(0.0, "most megabytes to train this site's network; 0: no limit", low=0)
    latency_ms: float = setting(0.0, "most milliseconds for one image, by latency_table, or else measured here; 0: no limit", low=0)
    latency_table: str = setting("", "file that `fedloom latency` wrote on the device that latency_ms is about", path=True)

    def limits(self) -> BudgetSettings | None:
        """Nothing without any."""
        return BudgetSettings(**asdict(self)) if self != SiteBudget() else None


@dataclass(frozen=True)
class SiteSettings:
    """SITE.toml; paths are relative to the file."""

    federation: str = setting("federation.toml", "the file that all members share", path=True)
    name: str = setting("", "name of this site in the federation")
    server: str = setting("127.0.0.1:9092", "HOST:PORT of the server")
    authority: str = setting("ca.pem", "certificate of the authority that signed the server's certificate", path=True)
    key: str = setting("key.pem", "this site's private key; it never leaves the site", path=True)
    images: str = setting("images", "this site's images: class folders, or train/ and test/ of class folders", path=True)
    folder: str = setting("fedloom-site", "folder for the site's memory, its model and the log of what left", path=True)
    device: str = setting("auto", "where the site trains: cpu, cuda, mps (on a Mac), or auto: a CUDA GPU if there is one", choices=DEVICES)
    threads: int = setting(
        0, "CPU threads; 0: torch decides. Results are equal bit for bit only with equal thread counts", low=0, high=1024
    )
    poll: float = setting(0.5, "most seconds between two requests for an instruction", low=0.01, high=60)
    wait: float = setting(0.0, "seconds to try to reach the server before giving up; 0: for ever", low=0)
    message_mb: int = setting(256, "largest instruction in megabytes", low=1, high=4096)
    secret: bool = setting(
        True, "random draws mix in a secret of this site; false: they are those of a rehearsal, and the server can repeat them"
    )
    onnx: bool = setting(True, "export the personal model to ONNX at the end, which takes some seconds")
    budget: SiteBudget = field(default_factory=SiteBudget)

    def own_folder(self, federation: str) -> Path:
        """Where all that this site keeps of a federation lies."""
        return Path(self.folder) / federation / self.name


def read_agreement(path: Path) -> Agreement:
    table = config.read_tables(str(path), {})
    members = config.fill(Members, table.pop("federation", {}), "federation")
    server = config.fill(ServerSettings, table.pop("server", {}), "server")
    members = replace(members, classes=tuple(sorted(map(class_name, members.classes))))  # in the order in which folders are read
    _check(path, members)
    table["data"] = {**_table(table, "data"), "name": "sites"}
    table["split"] = {**_table(table, "split"), "rule": "members"}
    settings = config.from_table({"participants": len(members.sites), **table, "clients": len(members.sites)})
    _check_real(path, settings)
    _check_keys(path, members, settings)
    folder = path.absolute().parent
    digest = _digest(members, settings)
    settings, server = (config.map_paths(own, lambda path: path and str(folder / path)) for own in (settings, server))
    return Agreement(members, settings, server, digest)


def read_site(path: Path) -> SiteSettings:
    site: SiteSettings = config.fill(SiteSettings, config.read_toml(path))
    if not NAME.fullmatch(site.name):
        raise InvalidConfig(
            f"{path}: name must be this site's name in the federation, got {site.name!r}. {name_cure(site.name)}", key="name"
        )
    _check_address(path, site.server)
    found: SiteSettings = config.map_paths(site, lambda own: own and str(path.absolute().parent / own))
    return found


def keep_to(agreement: Agreement, folder: Path, used: bool, key: str) -> None:
    """A folder goes on with the agreement it began with, and no other. used: something is in it already; key: the setting that names it."""
    note = folder / FEDERATION
    if not used:
        write_file(note, (json.dumps({"name": agreement.members.name, "digest": agreement.digest}) + "\n").encode())
        return
    try:
        known = parse_json(read_plain(note))["digest"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedRun(f"{note} does not say which federation {folder} belongs to. Choose another {key}") from error
    if known != agreement.digest:
        cure = f"Put the old settings back, or choose another {key}"
        raise InvalidConfig(f"{folder} holds rounds of this federation under other settings. {cure}", key=key)


def _check_address(path: Path, server: str) -> None:
    host, port = found.groups() if (found := ADDRESS.fullmatch(server)) else ("", "0")
    try:
        possible = host.encode("idna")  # the system's resolver refuses labels that are empty or too long with another error
    except UnicodeError:
        possible = b""
    if not possible or not 0 < int(port) < 65536:
        what = f"server must be HOST:PORT, such as fedloom.example.org:9092, got {printable(server, 80)!r}"
        raise InvalidConfig(f"{path}: {what}", key="server")


def _check(path: Path, members: Members) -> None:
    if not NAME.fullmatch(members.name):
        raise InvalidConfig(
            f"{path}: federation.name must be another, got {members.name!r}. {name_cure(members.name)}", key="federation.name"
        )
    for site in members.sites:
        if not NAME.fullmatch(site):
            raise InvalidConfig(f"{path}: {site!r} cannot be a site's name. {name_cure(site)}", key="federation.sites")
    for what, names, least in (("sites", members.sites, 1), ("classes", members.classes, 2)):
        if len(names) < least or len(set(names)) != len(names):
            raise InvalidConfig(f"{path}: federation.{what} must name at least {least}, each once", key=f"federation.{what}")
    if pairs := confused(members.classes):
        raise InvalidConfig(confusion(path, pairs[0]), key="federation.classes")
    if members.images and len(members.images) != len(members.sites):
        what = f"federation.images has {len(members.images)} numbers for {len(members.sites)} sites"
        raise InvalidConfig(f"{path}: {what}. Write one for each site, in the order of federation.sites", key="federation.images")


def name_cure(name: str) -> str:
    """Such names are names of files, of folders and of keys on every member's machine: ASCII is the same on all of them."""
    spelt = name.translate(SPELT)
    plain = "".join(letter for letter in unicodedata.normalize("NFKD", spelt) if not unicodedata.combining(letter))
    near = re.sub(r"[^A-Za-z0-9._-]+", "-", plain).strip("-._")[:63]
    such = f", such as {near}" if NAME.fullmatch(near) else ""
    return f"Use only the letters a to z and A to Z, digits, dots, dashes and underscores, and a letter or digit first{such}"


def _check_real(path: Path, settings: Settings) -> None:
    """What can be simulated only."""
    if settings.hardware != HardwareSettings():
        raise InvalidConfig(f"{path}: [hardware] simulates machines, and here they are real. Leave it out", key="hardware")
    if settings.budget.lists and not settings.budget.tiers:
        what = "budget.* has a limit for each tier, and nothing says which site is of which tier"
        raise InvalidConfig(f"{path}: {what}. Set budget.tiers, a number for each site in alphabetical order", key="budget.tiers")
    if settings.budget.latency_table:
        what = "a latency table is about one device, and FEDERATION.toml is for all of them"
        raise InvalidConfig(f"{path}: {what}. Set budget.latency_table in SITE.toml", key="budget.latency_table")
    if settings.split.test or settings.split.server:
        what = "a site's test images are in its folder and the server's in data.server. Leave split.test and split.server out"
        raise InvalidConfig(f"{path}: {what}", key="split")


def _check_keys(path: Path, members: Members, settings: Settings) -> None:
    """With secure sums a server that sent keys of its own for those of sites could read everything: sites must know each other's."""
    odd = [key for key in members.keys if not FINGERPRINT.fullmatch(key)]
    if odd or (members.keys and len(set(members.keys)) != len(members.sites)):
        what = "federation.keys must have a SHA-256 of 64 hexadecimal digits for each site, all different"
        raise InvalidConfig(f"{path}: {what}. `fedloom certs` prints them", key="federation.keys")
    if settings.privacy.secure and not members.keys:
        how = "`openssl pkey -pubin -in SITE.pub -outform DER | sha256sum` says that of a site"
        what = "privacy.secure needs federation.keys, the fingerprints of the sites' public keys"
        raise InvalidConfig(f"{path}: {what}. {how}", key="federation.keys")


def _table(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    own = table.get(name, {})
    if not isinstance(own, Mapping):
        raise InvalidConfig(f"{name} is a table of settings, not a value", key=name)
    return own


def _digest(members: Members, settings: Settings) -> str:
    """Of all that must be the same everywhere: not of paths, machines and engines."""
    neutral = config.map_paths(settings, bool)  # that there is one may matter, which one is a member's own business
    components = {name: asdict(own) for name, own in neutral.components.items() if name not in ENGINES}
    data = replace(settings.data, folder="", server="")
    same = replace(settings, engine="", plugins=(), weights="", components={}, run=RunSettings(), data=data)
    agreed = {key: value for key, value in asdict(members).items() if key not in ("images", "keys") or value}  # older ones have no such key
    # Plugins are the same if their content is.
    plugins = [hashlib.sha256(Path(name).read_bytes()).hexdigest() if name.endswith(".py") else name for name in settings.plugins]
    content = {"members": agreed, "settings": asdict(same), "components": components, "plugins": plugins}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
