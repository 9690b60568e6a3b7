"""The commands of a real federation: serve, site and certs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedloom.commands.terminal import console, say, stoppable
from fedloom.federation.agreement import read_agreement, read_site
from fedloom.federation.certificates import check_server, check_site, fingerprints_line, make_certificates
from fedloom.federation.server.rounds import rehearsal
from fedloom.federation.server.rounds import serve as run_server
from fedloom.federation.site.rounds import attend
from fedloom.report.terminal.live import LiveView


def serve(
    file: Annotated[Path, typer.Argument(metavar="FEDERATION.toml", help="the settings that all members share, and [server]")],
    rehearse: Annotated[
        Path | None,
        typer.Option(metavar="IMAGES", help="simulate the federation here instead; IMAGES holds a folder of images for every site"),
    ] = None,
) -> None:
    """Run the server of a federation. Started again, it continues after the last finished round."""
    agreement = read_agreement(file)
    if rehearse is None:
        check_server(agreement.server, agreement.sites)
    title = f"{agreement.settings.method} for {agreement.members.name}"
    with stoppable("The same command goes on after the last finished round"), LiveView(console, title) as view:
        result = run_server(agreement, view, say) if rehearse is None else rehearsal(agreement, rehearse, view)
    sites = len(result.ledger.final)
    say(f"The federation is over after {result.rounds} rounds; {sites} of {len(agreement.sites)} sites have their personal model")


def site(
    file: Annotated[Path, typer.Argument(metavar="SITE.toml", help="settings of this site: its name, key, images and server")],
) -> None:
    """Take part in a federation with this site's images and get a personal model."""
    with stoppable("The same command goes on from here"):
        settings = read_site(file)
        check_site(settings)
        folder = attend(settings, say)
    say(f"All of it is in {folder}")


def certs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="folder to write to; it must be empty")],
    sites: Annotated[str, typer.Option(help="names of the sites, separated by commas")],
    hosts: Annotated[str, typer.Option(help="names and addresses of the server, separated by commas")] = "localhost,127.0.0.1",
) -> None:
    """Make an authority, a server certificate and site keys for trying a federation."""
    names, places = ([part.strip() for part in text.split(",") if part.strip()] for text in (sites, hosts))
    for path in make_certificates(folder, names, places or ["localhost"]):
        say(str(path))
    say(f"For secure sums, in [federation] of FEDERATION.toml: {fingerprints_line(folder, names)}")
    say(f"Give {folder}/server to the server and {folder}/SITE to each site; {folder}/authority/ca-key.pem to nobody")
