package conn

import (
	"errors"
	"io"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/srtm-io/srtm/internal/testkit"
)

// computing is a decompressor that works until computing is closed.
type computing chan struct{}

func (c computing) Read([]byte) (int, error) {
	<-c
	return 0, io.EOF
}

// silent is a stream that has no bytes until it is closed.
type silent struct {
	stream
	computing
}

func (s silent) Read(b []byte) (int, error) { return s.computing.Read(b) }

// A decompressor needs a turn to work, and there is one turn fewer than processors. A decompressor without input has no
// turn, so idle connections do not delay others.
func TestDecompressorsTakeTurns(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		e := &env{unpackSlots: make(chan struct{}, 1)}
		var all sync.WaitGroup
		read := func(r io.Reader) {
			all.Go(func() {
				if _, err := (unpacked{r, e.unpackSlots}).Read(nil); !errors.Is(err, io.EOF) {
					t.Error(err)
				}
			})
			synctest.Wait()
		}
		turns := func(want int) {
			t.Helper()
			if got := len(e.unpackSlots); got != want {
				t.Errorf("%d have a turn, want %d", got, want)
			}
		}
		idle, first, second := silent{computing: make(computing)}, make(computing), make(computing)
		read(&unpackReader{g: &goroutine{client: &client{env: e}}, source: idle})
		turns(0)
		read(first)
		turns(1)
		read(second)
		close(idle.computing) // the bytes of idle have come, and idle waits for a turn, too
		synctest.Wait()
		turns(1)
		close(second) // second waits for a turn and does not notice
		synctest.Wait()
		turns(1)
		close(first)
		all.Wait()
		turns(0)
	})
}
