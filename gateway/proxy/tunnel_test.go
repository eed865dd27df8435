package proxy

import (
	"bufio"
	"encoding/binary"
	"io"
	"net"
	"net/http"
	"testing"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/testkit"
)

// When the gateway stops, a websocket ends with a close frame between two frames, as the protocol
// requires, however much of a frame the server has sent.
func TestWebsocketsEndWithACloseFrame(t *testing.T) {
	for name, sent := range map[string]string{"idle": "", "after a frame": "\x81\x02hi", "in a frame": "\x81\x05he", "in a header": "\x82\x7e\x00"} {
		t.Run(name, func(t *testing.T) {
			more := make(chan string)
			heard := make(chan string, 1)
			url := rawServer(t, func(c net.Conn, r *bufio.Reader) {
				readHead(r)
				_, _ = io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"+sent)
				go func() {
					for text := range more {
						_, _ = io.WriteString(c, text)
					}
				}()
				frame := make([]byte, 8)
				n, _ := io.ReadFull(r, frame)
				heard <- string(frame[:n])
			})
			g := serve(t, "[[server]]\nurl = \""+url+"\"", nil)
			c, r := g.dial(t)
			write(t, c, "GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
			testkit.Result(http.ReadResponse(r, nil)).Must(t)
			got := make([]byte, len(sent))
			testkit.Result(io.ReadFull(r, got)).Must(t)
			stopped := make(chan struct{})
			go func() { defer close(stopped); g.stop() }()
			testkit.WaitFor(t, "the Close frame", func() bool {
				g.tunnels.mu.Lock()
				defer g.tunnels.mu.Unlock()
				for w := range g.tunnels.mu.websockets {
					w.mu.Lock()
					defer w.mu.Unlock()
					return w.mu.leaving
				}
				return false
			})
			want := string(goingAway)
			switch name { // the end of the server's frame, and bytes that no longer go to the client
			case "in a frame":
				more <- "llo\x81\x01x"
				want = "llo" + want
			case "in a header":
				more <- "\x02ab\x81\x01x"
				want = "\x02ab" + want
			}
			got = make([]byte, len(want))
			testkit.Result(io.ReadFull(r, got)).Must(t)
			testkit.Equal(t, string(got), want, "the end")
			write(t, c, "\x88\x82\x00\x00\x00\x00\x03\xe9")
			testkit.Equal(t, <-heard, "\x88\x82\x00\x00\x00\x00\x03\xe9", "what the server receives")
			close(more)
			if rest, err := io.ReadAll(r); err != nil || len(rest) > 0 {
				t.Errorf("%q, %v", rest, err)
			}
			<-stopped
		})
	}
}

// However the bytes are split, the parser finds the end of each frame.
func TestFramesOfWebsockets(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var all []byte
		ends := map[int]bool{0: true}
		for range rapid.IntRange(0, 5).Draw(t, "frames") {
			length := rapid.SampledFrom([]int{0, 1, 125, 126, 127, 300, 65535, 65536, 70000}).Draw(t, "length")
			mask := byte(rapid.SampledFrom([]int{0, 0x80}).Draw(t, "mask"))
			all = append(all, 0x82)
			switch {
			case length < 126:
				all = append(all, mask|byte(length))
			case length < 1<<16:
				all = binary.BigEndian.AppendUint16(append(all, mask|126), uint16(length))
			default:
				all = binary.BigEndian.AppendUint64(append(all, mask|127), uint64(length))
			}
			if mask != 0 {
				all = append(all, 1, 2, 3, 4)
			}
			all = append(all, make([]byte, length)...)
			ends[len(all)] = true
		}
		var f frames
		for at := 0; at < len(all); {
			n := rapid.IntRange(1, min(len(all)-at, 70000)).Draw(t, "piece")
			piece := all[at : at+n]
			if rapid.Bool().Draw(t, "to the end of a frame") {
				begun := !f.atBoundary()
				n = f.payload(piece)
				if n < len(piece) && !f.atBoundary() || begun && n == 0 {
					t.Fatalf("%d of %d bytes, and not at an end", n, len(piece))
				}
				if n == 0 {
					n = 1
					f.skip(piece[:1])
				}
			} else {
				f.skip(piece)
			}
			at += n
			testkit.MustEqual(t, f.atBoundary(), ends[at], "at %d of %d", at, len(all))
		}
	})
}
