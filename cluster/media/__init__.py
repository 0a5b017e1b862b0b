"""Images, videos and sounds: from what a client sent to what an encoder takes. CPU only.

* `sources`: a data URI to bytes. `fetch`: the bytes of any item, also remote ones (async; everything else may
  block).
* `hashing`: the key of an item in every cache.
* `survey`: size and length of an item.
* `processes`, `opener`, `confinement`: the processes in which files are opened; for doors by `surveyors`, for
  encoders by `decoders`.
* `processor`: exact placeholder counts from a probe (door), model inputs from decoded media (encoder).
* `decode`: bytes to a survey and to arrays, by `images`, `videos` and `sounds`. `sampling`: which frames of
  a video are taken.
* `clips`: moving pictures in a container or an animated image.
* `container`: the only place that opens a container with FFmpeg, and the packets that may be read. `boxes`
  checks an MP4's index before that.

Whatever a client sends, these modules raise only MediaError or UnsupportedError.
"""
