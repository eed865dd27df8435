package obs

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
)

// blockedWriter blocks all writes until the test releases them.
type blockedWriter struct {
	began chan struct{} // a write is there
	free  chan struct{}
	mu    sync.Mutex
	out   bytes.Buffer
	fail  error
}

func newStuck() *blockedWriter {
	return &blockedWriter{began: make(chan struct{}, 1000), free: make(chan struct{})}
}

func (s *blockedWriter) Write(p []byte) (int, error) {
	s.began <- struct{}{}
	<-s.free
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fail != nil {
		return 0, s.fail
	}
	return s.out.Write(p)
}

func (s *blockedWriter) text() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.out.String()
}

func (s *blockedWriter) reset() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.out.Reset()
}

func line(i int) string { return fmt.Sprintf("line %06d\n", i) }

func TestALogThatNobodyReadsHoldsUpNobody(t *testing.T) {
	out := newStuck()
	w := NewLogWriter(out, 100*len(line(0)))
	w.setNotice(func(n uint64) []byte { return fmt.Appendf(nil, "%d dropped\n", n) })
	write := func(i int) {
		testkit.Result(io.WriteString(w, line(i))).MustEqual(t, len(line(i)))
	}
	write(0)
	<-out.began // the line is being written; later lines wait
	for i := 1; i < 10_000; i++ {
		write(i)
	}
	if got := w.Dropped(); got != 10_000-1-100 {
		t.Errorf("%d dropped, want all but the one being written and the 100 there is room for", got)
	}
	close(out.free)
	if !w.Flush(time.Minute) {
		t.Fatal("not flushed")
	}
	write(10_000)
	if !w.Flush(time.Minute) {
		t.Fatal("not flushed")
	}
	want := ""
	for i := range 101 {
		want += line(i)
	}
	want += "9899 dropped\n" + line(10_000)
	if got := out.text(); got != want {
		t.Errorf("%q, want 101 lines, the number dropped, and the last", got)
	}
}

func TestFlushIsBounded(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		out := newStuck()
		w := NewLogWriter(out, 100)
		if !w.Flush(0) {
			t.Error("there was nothing to write")
		}
		_, _ = io.WriteString(w, "x\n")
		start := time.Now()
		if w.Flush(time.Second) || time.Since(start) != time.Second {
			t.Errorf("flushed, or after %v; want false after a second", time.Since(start))
		}
		close(out.free)
		synctest.Wait()
		if !w.Flush(time.Second) || out.text() != "x\n" {
			t.Errorf("%q", out.text())
		}
	})
}

// Lines that could not be written count as dropped, and the writer tries later lines.
func TestLinesThatCannotBeWrittenAreCounted(t *testing.T) {
	out := newStuck()
	out.fail = errors.New("no space")
	close(out.free)
	w := NewLogWriter(out, 100)
	w.setNotice(func(n uint64) []byte { return fmt.Appendf(nil, "%d dropped\n", n) })
	_, _ = io.WriteString(w, "a\nb\n")
	w.Flush(time.Minute)
	testkit.Equal(t, w.Dropped(), 2, "dropped")
	out.mu.Lock()
	out.fail = nil
	out.mu.Unlock()
	_, _ = io.WriteString(w, "c\n")
	w.Flush(time.Minute)
	testkit.Equal(t, out.text(), "c\n2 dropped\n")
}

func TestLinesOfManyAreNeitherLostNorTorn(t *testing.T) {
	r, pipe := io.Pipe()
	w := NewLogWriter(pipe, 1<<20)
	var writers sync.WaitGroup
	for g := range 8 {
		writers.Go(func() {
			for i := range 1000 {
				fmt.Fprintf(w, "%d %d\n", g, i)
			}
		})
	}
	next := [8]int{}
	read := make(chan struct{})
	go func() {
		defer close(read)
		for s := bufio.NewScanner(r); s.Scan(); {
			var g, i int
			if _, err := fmt.Sscanf(s.Text(), "%d %d", &g, &i); err != nil || i != next[g] {
				t.Errorf("line %q, want %d of %d", s.Text(), next[g], g)
			}
			next[g]++
		}
	}()
	writers.Wait()
	if !w.Flush(time.Minute) || w.Dropped() != 0 {
		t.Errorf("not flushed, or %d dropped", w.Dropped())
	}
	_ = pipe.Close()
	<-read
	testkit.Equal(t, next, [8]int{1000, 1000, 1000, 1000, 1000, 1000, 1000, 1000}, "lines of each")
}

var droppedCount = regexp.MustCompile(`count"?[=:](\d+)`)

func TestDroppedLinesAreSaidInTheLogsOwnFormat(t *testing.T) {
	for format, want := range map[string]string{"text": "level=ERROR", "json": `"level":"ERROR"`} {
		out := newStuck()
		w := NewLogWriter(out, 200)
		log, _, err := NewLogger(w, "info", format)
		testkit.Must(t, err)
		for range 10 {
			log.Info("something", KeyTopic, "t")
		}
		close(out.free)
		w.Flush(time.Minute)
		lines := strings.Split(strings.TrimSpace(out.text()), "\n")
		// Each chunk states how many lines were dropped before it: one line or more, depending on when
		// the writing goroutine was scheduled.
		dropped := uint64(0)
		for _, line := range lines {
			if !strings.Contains(line, "log lines were dropped") {
				continue
			}
			count := droppedCount.FindStringSubmatch(line)
			if !strings.Contains(line, want) || count == nil {
				t.Fatalf("line %q", line)
			}
			n, _ := strconv.ParseUint(count[1], 10, 64)
			dropped += n
		}
		if dropped == 0 || dropped != w.Dropped() {
			t.Errorf("%d dropped, %d said:\n%s", w.Dropped(), dropped, out.text())
		}
	}
}
