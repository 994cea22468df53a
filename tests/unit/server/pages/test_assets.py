"""Static files: all local, cached forever by browsers, and no access to other files on disk."""

import hashlib
import re

import pytest

from server.pages import assets

#: The only external link; pages load nothing from it.
PERFETTO = '<a href="https://ui.perfetto.dev" rel="noopener noreferrer">'
#: `htmx.org` 2.0.11 of npm, dist/htmx.min.js.
HTMX = "d6fdc75f204e6bdefa99b69bf1e6d4ac69b8a364f77929f45c13476b4000f717"


def test_htmx_is_what_its_makers_published():
    assert hashlib.sha256((assets.FOLDER / "htmx.js").read_bytes()).hexdigest() == HTMX
    assert (assets.FOLDER / "htmx.LICENSE").read_text("utf-8").startswith("Zero-Clause BSD")


@pytest.mark.parametrize("name", ["kitsune.css", "kitsune.js", "kitsune.svg", "htmx.js"])
def test_an_asset_is_kept_for_good(stranger, name):
    answer = stranger.get(assets.address(name))
    assert answer.status_code == 200
    assert answer.content == (assets.FOLDER / name).read_bytes()
    assert answer.headers["content-type"].partition(";")[0] == assets.MEDIA_TYPES[f".{name.partition('.')[2]}"]
    assert answer.headers["cache-control"] == "public, max-age=31536000, immutable"
    again = stranger.get(assets.address(name), headers={"If-None-Match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_another_content_has_another_address():
    name = "kitsune.css"
    digest = hashlib.sha256((assets.FOLDER / name).read_bytes()).hexdigest()
    assert assets.address(name) == f"/static/{digest[:16]}/{name}"


@pytest.mark.parametrize(
    "path",
    ["0000000000000000/kitsune.css", "{}/htmx.LICENSE", "{}/../base.html", "{}/..%2fframe.py", "{}/%2e%2e", "{}/"],
)
def test_nothing_else_is_there(stranger, path):
    digest = assets.assets()["kitsune.css"].digest
    assert stranger.get(f"/static/{path.format(digest)}").status_code == 404


def test_styles_and_scripts_ask_for_nothing_from_elsewhere():
    for name in ("kitsune.css", "kitsune.js"):
        text = (assets.FOLDER / name).read_text("utf-8")
        assert not re.search(r"https?://|@import|url\(|\beval\b|innerHTML", text)


def test_no_template_holds_a_script_a_style_or_another_host():
    for template in (assets.FOLDER.parent / "templates").glob("*.html"):
        text = re.sub(r"\{#.*?#\}", "", template.read_text("utf-8"), flags=re.DOTALL)
        if template.name == "run_export.html":  # a file of its own, which brings its style along
            continue
        assert not re.search(r"<style|\sstyle=|\son[a-z]+=|<script(?![^>]*\ssrc=)|hx-on|javascript:", text), (
            template.name
        )
        text = text.replace(PERFETTO, "")
        assert not re.search(r"(src|href|action)=\"(https?:)?//", text), template.name
        assert not re.search(r"\|\s*safe\b", text), template.name
