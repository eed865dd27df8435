package broker

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/nsqd/queue"
)

const (
	// maxLetters bounds the dead letters of all topics that wait for storage. Further
	// letters remain in their channels, which offer them again after deadLetterRetry.
	maxLetters = 1024
	// deadLetterRetry is the time that a channel keeps a dead letter after a failure.
	deadLetterRetry = time.Second
	// deadLetterWithin bounds one attempt to store a dead letter. The bound is less than
	// the time after which the channel offers the letter again, so that no letter is stored
	// twice.
	deadLetterWithin = 10 * time.Second
)

// deadLetters publishes dead letters to their dead-letter topics, one at a time. A channel
// keeps the message until the letter is stored, so a crash can duplicate a letter but never
// lose it. A goroutine runs only while letters wait.
type deadLetters struct {
	// Set once.
	workers *sync.WaitGroup
	log     *slog.Logger
	publish func(ctx context.Context, topic string, body []byte) error
	ctx     context.Context // cancelled by end
	end     context.CancelFunc

	mu struct {
		sync.Mutex
		waiting []letter
		running bool
	}
}

// letter is a message that a channel gave up.
type letter struct {
	from *runner
	to   string // dead-letter topic
	dead queue.Dead
	wall mono.Wall // publication time of the message
}

func newDeadLetters(workers *sync.WaitGroup, log *slog.Logger, publish func(context.Context, string, []byte) error) *deadLetters {
	d := &deadLetters{workers: workers, publish: publish, log: log}
	if log == nil {
		d.log = slog.New(slog.DiscardHandler)
	}
	d.log, _ = obs.Sparse(d.log)
	d.ctx, d.end = context.WithCancel(context.Background())
	return d
}

// letter addresses a message that a channel gave up. Requires: mu held.
func (r *runner) letter(d queue.Dead) letter {
	return letter{from: r, to: r.mu.expiry.of(d.Channel()).DeadLetter, dead: d, wall: d.Message.Timestamp}
}

// add queues a letter. It returns false if the queue is full, the broker stops, or the
// channel has no dead-letter topic. It does not block.
func (d *deadLetters) add(l letter) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.mu.waiting) >= maxLetters || d.ctx.Err() != nil || l.to == "" {
		return false
	}
	d.mu.waiting = append(d.mu.waiting, l)
	if !d.mu.running {
		d.mu.running = true
		d.workers.Go(d.run)
	}
	return true
}

// next removes the oldest letter. It returns false if there is none; then run must end.
func (d *deadLetters) next() (l letter, more bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.mu.waiting) == 0 {
		d.mu.running, d.mu.waiting = false, nil
		return letter{}, false
	}
	l = d.mu.waiting[0]
	d.mu.waiting[0] = letter{}
	d.mu.waiting = d.mu.waiting[1:]
	return l, true
}

func (d *deadLetters) run() {
	for l, more := d.next(); more; l, more = d.next() {
		ctx, cancel := context.WithTimeout(d.ctx, deadLetterWithin)
		err := ctx.Err()
		if err == nil {
			err = d.publish(ctx, l.to, l.encode())
		}
		cancel()
		if err != nil && d.ctx.Err() == nil {
			d.log.Warn("cannot store a dead letter; its channel keeps the message", obs.KeyTopic, l.from.name,
				obs.KeyChannel, l.dead.Channel(), "dead_letter", l.to, obs.KeyError, err)
		}
		l.from.do(func(now mono.Time, s *step) {
			l.from.mu.core.Bury(now, l.dead, err == nil, deadLetterRetry, &s.fx)
		})
	}
}

// envelope is the body of a dead letter. Either Body or Base64 is set, unless the message
// was empty.
type envelope struct {
	Topic     string `json:"topic"`
	Channel   string `json:"channel"`
	Attempts  uint16 `json:"attempts"` // number of deliveries
	ID        string `json:"id"`
	Timestamp int64  `json:"timestamp"`             // publication time, ns since 1970
	Body      string `json:"body,omitempty"`        // body of the message, if valid UTF-8
	Base64    []byte `json:"body_base64,omitempty"` // body of the message otherwise
}

// encode returns the letter's body as JSON.
func (l letter) encode() []byte {
	m := l.dead.Message
	e := envelope{Topic: l.from.name, Channel: l.dead.Channel(), Attempts: l.dead.Attempts, ID: string(m.ID[:]), Timestamp: int64(l.wall)}
	if utf8.Valid(m.Body) {
		e.Body = string(m.Body)
	} else {
		e.Base64 = m.Body
	}
	b, err := json.Marshal(e)
	if err != nil {
		panic("broker: dead letter: " + err.Error())
	}
	return b
}

// publishDeadLetter publishes to the topic on this broker, or through Config.DeadLetter. It
// returns after the message is stored according to the topic's durability.
func (b *Broker) publishDeadLetter(ctx context.Context, topic string, body []byte) error {
	now, stored := b.shared.now(), Stored{}
	t, err := b.TopicForClient([]byte(topic))
	if err == nil {
		err = t.intake.Publish(now, clock.Wall(), Published{Body: body, Arrival: stamp.Arrival{At: now, Source: stamp.Read}, Stored: &stored})
	}
	switch {
	case err == nil:
		return t.intake.Sync(stored)
	case b.shared.cfg.DeadLetter != nil && (errors.Is(err, ErrUnknownTopic) || errors.Is(err, ErrRetired)):
		return b.shared.cfg.DeadLetter(ctx, topic, body)
	}
	return err
}
