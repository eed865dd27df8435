package conn

import (
	"errors"
	"io"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/srtm-io/srtm/internal/testkit"
)

// computing is a decompressor at work, until it is closed.
type computing chan struct{}

func (c computing) Read([]byte) (int, error) {
	<-c
	return 0, io.EOF
}

// silent is a stream of which nothing comes, until it is closed.
type silent struct {
	stream
	computing
}

func (s silent) Read(b []byte) (int, error) { return s.computing.Read(b) }

// A decompressor works while it has a turn, of which there are as many as processors but one,
// and has none while it waits for bytes: connections that are idle keep no other waiting.
func TestDecompressorsTakeTurns(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		e := &env{unpacks: make(chan struct{}, 1)}
		var all sync.WaitGroup
		read := func(r io.Reader) {
			all.Go(func() {
				if _, err := (unpacked{r, e.unpacks}).Read(nil); !errors.Is(err, io.EOF) {
					t.Error(err)
				}
			})
			synctest.Wait()
		}
		turns := func(want int) {
			t.Helper()
			if got := len(e.unpacks); got != want {
				t.Errorf("%d have a turn, want %d", got, want)
			}
		}
		idle, first, second := silent{computing: make(computing)}, make(computing), make(computing)
		read(&unpackReader{g: &goroutine{client: &client{env: e}}, under: idle})
		turns(0)
		read(first)
		turns(1)
		read(second)
		close(idle.computing) // its bytes have come, and it waits for a turn, too
		synctest.Wait()
		turns(1)
		close(second) // which does not know
		synctest.Wait()
		turns(1)
		close(first)
		all.Wait()
		turns(0)
	})
}
