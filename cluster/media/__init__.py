"""Images, videos and sounds: from what a client sent to what an encoder takes. CPU only.

`sources`: a data URI to bytes. `fetch`: any item's bytes, remote ones too (async; all else here may block). `hashing`: the
name of an item. `probe`: size and length of an item. `processor`: exact
placeholder counts from a probe (door), model inputs from decoded media (encoder). `decode`: bytes to arrays, by `images`,
`videos` and `sounds`. `sampling`: which frames of a video. `clips`: moving pictures in a container or an animated image.
`container`: the one place that opens a container with FFmpeg; `boxes` looks at an MP4's index first. `budget`: the time and
packets that one look at an item may take. Whatever a client sends, these raise MediaError or UnsupportedError and nothing else.
"""
