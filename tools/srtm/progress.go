package main

import (
	"fmt"
	"io"
	"io/fs"
	"os"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/srtm-io/srtm/tools/srtm/screen"
)

// progressAfter is the silence after which progress starts.
const progressAfter = 2 * time.Second

// progress shows on a terminal what a slow command is doing: one line on standard error,
// removed before other output. Its methods are safe for concurrent use.
type progress struct {
	// set once
	end  chan struct{} // closed by stop
	done chan struct{} // closed after the last drawing
	once sync.Once

	mu     sync.Mutex
	screen *screen.Screen
	text   string
	quiet  bool // output has begun
}

// startProgress begins with text. It shows nothing if standard error is no terminal or
// the output is a pipe.
func startProgress(cmd *cobra.Command, text string) *progress {
	p := &progress{end: make(chan struct{}), done: make(chan struct{}), text: text, screen: screen.New(cmd.ErrOrStderr())}
	if !p.screen.Terminal || isPipe(cmd.OutOrStdout()) {
		p.quiet = true
		close(p.done)
		return p
	}
	cmd.SetErr(p.before(cmd.ErrOrStderr(), false))
	go p.run()
	return p
}

func isPipe(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	info, err := f.Stat()
	return err == nil && info.Mode()&fs.ModeNamedPipe != 0
}

func (p *progress) run() {
	defer close(p.done)
	begin := time.Now()
	timer := time.NewTimer(progressAfter)
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
			p.draw(time.Since(begin))
			timer.Reset(time.Second)
		case <-p.end:
			p.mu.Lock()
			p.screen.Clear()
			p.mu.Unlock()
			return
		}
	}
}

func (p *progress) draw(since time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.quiet {
		_ = p.screen.Draw(fmt.Sprintf("%s (%.0f s)\n", p.text, since.Seconds()))
	}
}

func (p *progress) printf(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.quiet {
		p.text = fmt.Sprintf(format, args...)
	}
}

// stop ends the progress line.
func (p *progress) stop() {
	p.once.Do(func() { close(p.end) })
	<-p.done
}

// before wraps w so that the line is removed before each write; last ends the line for
// good.
func (p *progress) before(w io.Writer, last bool) io.Writer { return &undisturbed{p, w, last} }

type undisturbed struct {
	p    *progress
	w    io.Writer
	last bool
}

func (u *undisturbed) Write(b []byte) (int, error) {
	u.p.mu.Lock()
	defer u.p.mu.Unlock()
	u.p.screen.Clear()
	u.p.quiet = u.p.quiet || u.last
	return u.w.Write(b)
}
