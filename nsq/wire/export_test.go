package wire

import (
	"strconv"
	"time"
)

// ParseCommand is Command.Parse of a command without parsed bytes.
func ParseCommand(in []byte, lim Limits) (cmd Command, n int, need int, err error) {
	n, need, err = cmd.Parse(in, &lim, new(Walk))
	return cmd, n, need, err
}

// Commands that none of our clients sends. A delay is sent in whole milliseconds, rounded down.

func AppendAuth(dst, secret []byte) []byte {
	return appendBody(append(dst, "AUTH\n"...), secret)
}

func AppendDpub(dst []byte, topic string, delay time.Duration, body []byte) []byte {
	dst = append(dst, "DPUB "...)
	dst = append(dst, topic...)
	dst = appendMillis(append(dst, ' '), delay)
	return appendBody(append(dst, '\n'), body)
}

func AppendReq(dst []byte, id MessageID, delay time.Duration) []byte {
	dst = append(append(append(dst, "REQ "...), id[:]...), ' ')
	return append(appendMillis(dst, delay), '\n')
}

func AppendTouch(dst []byte, id MessageID) []byte {
	return append(append(append(dst, "TOUCH "...), id[:]...), '\n')
}

func AppendCls(dst []byte) []byte { return append(dst, "CLS\n"...) }

func appendMillis(dst []byte, d time.Duration) []byte {
	return strconv.AppendInt(dst, int64(d/time.Millisecond), 10)
}
