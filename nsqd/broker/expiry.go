package broker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/expiry"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/kernel/stamp"
	"github.com/srtm-io/srtm/nsqd/metadata"
	"github.com/srtm-io/srtm/nsqd/queue"
)

// expirySettings holds the expiry settings of a topic and its channels.
type expirySettings struct {
	topic    expiry.Settings
	channels map[string]expiry.Settings // includes channels that do not exist yet
}

// of returns the effective settings of a channel.
func (e *expirySettings) of(channel string) expiry.Settings {
	return e.channels[channel].Within(e.topic)
}

// set replaces the settings of a channel. The zero Settings remove them.
func (e *expirySettings) set(channel string, to expiry.Settings) {
	if !to.On() {
		delete(e.channels, channel)
		return
	}
	if e.channels == nil {
		e.channels = make(map[string]expiry.Settings)
	}
	e.channels[channel] = to
}

// recorded returns the settings for the metadata file.
func (e *expirySettings) recorded() (topic *expiry.Settings, channels map[string]expiry.Settings) {
	if e.topic.On() {
		own := e.topic
		topic = &own
	}
	return topic, maps.Clone(e.channels)
}

// validate returns an error if the settings are invalid for the named topic.
func (e *expirySettings) validate(topic string) error {
	if err := e.topic.Validate(topic); err != nil {
		return err
	}
	if e.topic.DeadLetter != "" && e.topic.MaxAttempts == 0 {
		return expiry.ErrNoAttempts
	}
	for name, own := range e.channels { // order: any fault is one
		if err := own.Validate(topic); err != nil {
			return fmt.Errorf("channel %q: %w", name, err)
		}
		if own.DeadLetter != "" && e.of(name).MaxAttempts == 0 {
			return fmt.Errorf("channel %q: %w", name, expiry.ErrNoAttempts)
		}
	}
	return nil
}

// expiries changes the expiry settings of a topic and its channels.
type expiries struct {
	// Set once.
	runner *runner
	orders *orders
}

func ofQueue(e expiry.Settings) queue.Expiry {
	return queue.Expiry{TTL: e.TTL, MaxAttempts: e.MaxAttempts, DeadLetters: e.DeadLetter != ""}
}

// SetExpiry sets when the topic gives messages up, including waiting messages. The zero
// Settings keep all messages. Error: the settings contradict each other or are out of
// range.
func (t *Topic) SetExpiry(to expiry.Settings) error {
	return t.expiry.expire(func(e *expirySettings) { e.topic = to })
}

// SetChannelExpiry sets when a channel gives messages up. The channel need not exist. With
// the zero Settings the topic's settings apply. Errors: as SetExpiry.
func (t *Topic) SetChannelExpiry(channel string, to expiry.Settings) error {
	return t.expiry.expire(func(e *expirySettings) { e.set(channel, to) })
}

// SetExpiries replaces the settings of the topic and all its channels. Errors: as
// SetExpiry.
func (t *Topic) SetExpiries(topic expiry.Settings, channels map[string]expiry.Settings) error {
	return t.expiry.expire(func(e *expirySettings) { e.topic, e.channels = topic, maps.Clone(channels) })
}

// expire applies a change completely or not at all. Errors: as validate; ErrStorage.
func (e *expiries) expire(change func(*expirySettings)) error {
	e.runner.mu.Lock()
	next, differs := e.expiryAfter(change)
	err := next.validate(e.runner.name)
	e.runner.mu.Unlock()
	if err != nil || !differs {
		return err
	}
	return e.orders.ordered(func(m *metadata.Topic) bool {
		next, _ := e.expiryAfter(change)
		m.Expiry, m.Expiries = next.recorded()
		return true
	}, func(now mono.Time, s *step) error {
		next, _ := e.expiryAfter(change)
		if err := next.validate(e.runner.name); err != nil || e.runner.mu.closed { // another order came first
			return err
		}
		e.runner.mu.expiry = next
		e.runner.mu.core.SetExpiry(now, ofQueue(next.topic), &s.fx)
		for _, c := range e.runner.mu.core.Channels() {
			e.applyExpiry(now, c, s)
		}
		return nil
	})
}

// expiryAfter returns the settings after a change, and whether they differ from the current
// settings. Requires: mu held.
func (e *expiries) expiryAfter(change func(*expirySettings)) (next expirySettings, differs bool) {
	next = expirySettings{e.runner.mu.expiry.topic, maps.Clone(e.runner.mu.expiry.channels)}
	change(&next)
	return next, next.topic != e.runner.mu.expiry.topic || !maps.Equal(next.channels, e.runner.mu.expiry.channels)
}

// applyExpiry applies a channel's own settings. Requires: mu held.
func (e *expiries) applyExpiry(now mono.Time, c *queue.Channel, s *step) {
	if own := ofQueue(e.runner.mu.expiry.channels[c.Name()]); own != c.Expiry() {
		e.runner.mu.core.SetChannelExpiry(now, c, own, &s.fx)
	}
}

// restoreExpiry restores the settings of an earlier process. The settings were valid.
func (e *expiries) restoreExpiry(topic *expiry.Settings, channels map[string]expiry.Settings) {
	var own expiry.Settings
	if topic != nil {
		own = *topic
	}
	_ = e.expire(func(e *expirySettings) { e.topic, e.channels = own, maps.Clone(channels) })
}

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
	stop    context.CancelFunc

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
	d.ctx, d.stop = context.WithCancel(context.Background())
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
	Attribute []byte `json:"attribute,omitempty"`   // attribute of the message
}

// encode returns the letter's body as JSON.
func (l letter) encode() []byte {
	m := l.dead.Message
	e := envelope{Topic: l.from.name, Channel: l.dead.Channel(), Attempts: l.dead.Attempts, ID: string(m.ID[:]), Timestamp: int64(l.wall), Attribute: m.Attribute()}
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
