package nsqhttp

import (
	"bytes"
	"encoding/binary"
	"io"
	"net/http"
	"net/url"
	"slices"
	"testing"

	"github.com/srtm-io/srtm/nsq/wire"
)

// A request to publish may hold anything. An accepted message is within the limits, and equals the
// body.
func FuzzPublish(f *testing.F) {
	mpub := binary.BigEndian.AppendUint32(nil, 2)
	for _, body := range []string{"a", "bc"} {
		mpub = append(binary.BigEndian.AppendUint32(mpub, uint32(len(body))), body...)
	}
	for _, body := range [][]byte{nil, []byte("one"), []byte("one\n\ntwo\n"), []byte("a line that is too long"), mpub, mpub[:9], binary.BigEndian.AppendUint32(nil, 1<<31)} {
		for _, query := range []string{"topic=t", "topic=t&binary=true&defer=5", "topic=bad*name", "topic=t&defer=-1&binary=maybe", "topic=%zz&topic=t;"} {
			f.Add(query, body)
		}
	}
	limits := wire.DefaultLimits()
	limits.MaxMessageSize, limits.MaxBodySize = 10, 40
	f.Fuzz(func(t *testing.T, query string, body []byte) {
		request := func() *http.Request {
			return &http.Request{URL: &url.URL{RawQuery: query}, ContentLength: -1, Body: http.NoBody}
		}
		r := request()
		r.Body = io.NopCloser(bytes.NewReader(body))
		topic, message, wait, err := ReadPub(r, limits)
		if err == nil && (!wire.ValidTopicName(topic) || wait < 0 || wait > limits.MaxDefer() || len(message) > limits.MaxMessageSize || len(message) == 0 || !bytes.Equal(message, body)) {
			t.Errorf("pub %q to %q for %v, of %q", message, topic, wait, body)
		}

		r = request()
		r.Body = io.NopCloser(bytes.NewReader(body))
		topic, batch, wait, err := ReadMpub(r, limits)
		if err != nil {
			return
		}
		var lines, sizes []byte
		n, size := 0, 0
		sizes = binary.BigEndian.AppendUint32(sizes, uint32(batch.Len()))
		batch.Each(func(m []byte) {
			if len(m) == 0 || len(m) > limits.MaxMessageSize {
				t.Errorf("a message of %d bytes, of %q", len(m), body)
			}
			lines = append(append(lines, m...), '\n')
			sizes = append(binary.BigEndian.AppendUint32(sizes, uint32(len(m))), m...)
			n, size = n+1, size+len(m)
		})
		filled := slices.DeleteFunc(bytes.SplitAfter(append(slices.Clone(body), '\n'), newline), func(l []byte) bool { return len(l) <= 1 })
		if !wire.ValidTopicName(topic) || wait < 0 || wait > limits.MaxDefer() || n != batch.Len() || size != batch.Bytes() || len(body) > limits.MaxBodySize ||
			!bytes.Equal(lines, bytes.Join(filled, nil)) && !bytes.HasPrefix(body, sizes) {
			t.Errorf("mpub of %d with %d bytes to %q for %v, of %q", batch.Len(), batch.Bytes(), topic, wait, body)
		}
	})
}
