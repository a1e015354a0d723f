"""The page of a report, in the browser that its readers have."""

import json
import re

import pytest
from command import dumped, inside

# Clicks headings, and writes what came of it and what was asked of the network into the document.
PROBE = """<script>
const all = (what) => [...document.querySelectorAll(what)];
const column = (place) => all("#pairs tbody tr").map((row) => row.cells[place].innerText);
const names = all("#pairs th").map((heading) => heading.innerText);
const seen = { names };
for (const name of ["HBM after, GiB", "seq"]) {
  const place = names.indexOf(name), button = all("#pairs th button")[place];
  button.click(); seen[`${name} up`] = column(place);
  button.click(); seen[`${name} down`] = column(place);
  seen[`${name} said`] = button.parentElement.getAttribute("aria-sort");
}
seen.background = getComputedStyle(document.body).backgroundColor;
seen.overflow = document.documentElement.scrollWidth - document.documentElement.clientWidth;
seen.drawn = all("img").map((image) => image.complete && image.naturalWidth > 0 && image.alt !== "");
const asked = performance.getEntriesByType("resource").map((entry) => entry.name);
seen.asked = asked.filter((name) => !name.startsWith("data:"));
document.documentElement.setAttribute("data-seen", JSON.stringify(seen));
</script>"""


@pytest.fixture(scope="module")
def page(make, tmp_path_factory):
    """A page of native, chunked and blocked cases, with a part that looks at it."""
    folder = tmp_path_factory.mktemp("page")
    process = inside("report", make.run(folder / "run", make.blocked()), "--format", "html")
    assert process.stdout == f"Written to {folder / 'run' / 'report.html'}\n"
    text = (folder / "run" / "report.html").read_text()
    # What the browser refuses of the page itself is said on its console.
    probed = folder / "probed.html"
    probed.write_text(text.replace("</body>", f"{PROBE}</body>"))
    return text, probed


def seen(page, profile, *flags):
    process = dumped(page[1].as_uri(), profile, "--enable-logging=stderr", *flags)
    assert "CONSOLE" not in process.stderr
    found = re.search(r"data-seen='([^']*)'|data-seen=\"([^\"]*)\"", process.stdout)
    assert found, process.stdout[:2000]
    text = found[1] or found[2].replace("&quot;", '"')
    return json.loads(text.replace("&gt;", ">").replace("&lt;", "<").replace("&amp;", "&"))


def test_it_sorts_asks_for_nothing_and_has_no_error(page, tmp_path):
    found = seen(page, tmp_path)
    sizes = [cell for cell in found["HBM after, GiB up"] if cell != "OOM"]
    assert sizes == sorted(sizes, key=float)
    assert found["HBM after, GiB up"][-1] == found["HBM after, GiB down"][-1] == "OOM"  # unknown last
    assert [cell for cell in found["HBM after, GiB down"] if cell != "OOM"] == sizes[::-1]
    assert found["seq up"] == sorted(found["seq up"], key=lambda cell: int(cell[:-1]))
    assert found["seq said"] == "descending"
    assert found["asked"] == []
    assert found["drawn"] == [True, True]
    assert found["background"] == "rgb(255, 255, 255)"


def test_it_is_dark_where_the_reader_is_and_fits_a_phone(page, tmp_path):
    found = seen(page, tmp_path, "--blink-settings=preferredColorScheme=0", "--window-size=390,800")
    assert found["background"] == "rgb(13, 17, 23)"
    assert found["overflow"] <= 0


def test_it_names_nothing_outside_itself(page):
    text, _ = page
    addresses = re.findall(r'(?:src|href|srcset|action)="([^"]*)"|url\(([^)]*)\)', text)
    assert all(address.startswith("data:") for pair in addresses for address in pair if address)
    assert "default-src 'none'" in text
    assert "<img" in text
    assert 'alt=""' not in text


def test_what_a_person_wrote_is_text_and_no_markup(make, tmp_path):
    impl = "x<script>alert(1)</script>|.py:build"
    run = make.run(tmp_path / "run", [record | {"impl": impl} for record in make.blocked()])
    assert inside("report", run, "--format", "html").returncode == 0
    text = (run / "report.html").read_text()
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;|.py:build" in text
