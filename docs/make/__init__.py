"""Makes the guide `docs/how-sharding-works/` from the running engine; tells what is stale in it.

    python -m docs.make            # write every generated part anew
    python -m docs.make --check    # write nothing; exit 1, with a diff, if a part is stale

[Note: how a page is made]
A page is Markdown with markers, and is source and result at once: what stands between a marker and
`<!-- end -->` is generated, everything else is prose. Markers (see `markers`):

    code FILE NAME      a function or class of the engine, or some lines of it (see `source`)
    run MODULE.NAME     a function of `docs/make/show/`: its lines, what they print on ranks
    table MODULE.NAME   Markdown that such a function returns
    picture MODULE.NAME an SVG that such a function returns, written to `pictures/`
    value MODULE.NAME   a number in the middle of a sentence
    change N, answer N  of exercise N (see `exercises`): the line to change, the tests that tell

Everything is compared exactly, so nothing that depends on a clock or a machine is shown: pictures
of time follow the order of the engine's events under a fixed cost of each (see `timeline`).
"""
