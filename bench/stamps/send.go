//go:build linux

package stamps

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"time"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/tools/load"
)

var quiet = slog.New(slog.DiscardHandler)

// sendCommand makes this program the sender. The program starts itself with sendCommand.
const sendCommand = "send"

// order is the task of a sender.
type order struct {
	Address  string
	Scenario load.Scenario
	Duration time.Duration
	Seed     uint64
}

// sendMain runs the sender's process. It connects, waits for the end of in, sends, and
// prints the number of messages.
func sendMain(ctx context.Context, args []string, in io.Reader, out io.Writer) error {
	var o order
	if err := json.Unmarshal([]byte(args[0]), &o); err != nil {
		return fmt.Errorf("order: %w", err)
	}
	p, err := load.Connect(o.Address, o.Scenario, load.Raw())
	if err != nil {
		return err
	}
	defer p.Close()
	if _, err := io.Copy(io.Discard, in); err != nil {
		return err
	}
	sent, err := p.Send(ctx, clock.Mono(), o.Duration, o.Seed)
	if err != nil {
		return err
	}
	return json.NewEncoder(out).Encode(sent)
}

// sender is a sender's process.
type sender struct {
	*local.Process
	begin  *io.PipeWriter
	stderr bytes.Buffer // owned by the process until its end
}

// startSender starts a sender, which connects.
func startSender(o order) (*sender, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	text, err := json.Marshal(o)
	if err != nil {
		return nil, err
	}
	in, begin := io.Pipe()
	s := &sender{begin: begin}
	// The sender needs one thread. The receiver uses the other processors.
	s.Process, err = local.Start(self, []string{"stamps", sendCommand, string(text)}, local.Options{Env: []string{"GOMAXPROCS=1"}, Stdin: in, Stdout: &s.stderr})
	return s, err
}

// finish starts the sending, waits for the end, and returns the number of messages.
func (s *sender) finish() (sent int, err error) {
	s.begin.Close()
	<-s.Done()
	if err := s.Failure(); err != nil {
		return 0, err
	}
	return sent, json.Unmarshal(s.stderr.Bytes(), &sent)
}
