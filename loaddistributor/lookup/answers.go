package lookup

import (
	"encoding/json"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/srtm-io/srtm/internal/container"
)

const (
	// maxWritten bounds the total bytes of all answers in writing, except the newest.
	maxWritten = 128 << 20
	// uncounted is the size of an answer below which its connection costs more than the
	// answer.
	uncounted = 4 << 10
	// maxMade bounds the number of full lists in preparation.
	maxMade = 2
)

// answers bounds the cost of clients that request large answers and do not read them. A
// list of 100,000 topics on six brokers has 13 MB, and one HTTP/2 connection may request
// hundreds at a time. When the bound is exceeded, answers cuts the oldest answer short. A
// client that reads has its answer by then. If new answers waited instead, clients that
// do not read would block other clients.
type answers struct {
	// Set by newAnswers.
	maxBytes int           // bytes
	making   chan struct{} // has an element for each list in preparation

	cut atomic.Uint64 // written by the answers that cut, read for metrics

	mu struct {
		sync.Mutex
		bytes       int                      // total bytes in writing
		oldestFirst container.List[*written] // the oldest first
	}
}

// written is an answer in writing.
type written struct {
	// Set by write.
	bytes int
	conn  *http.ResponseController

	// Guarded by answers.mu.
	place   container.Element[*written]
	counted bool

	ending sync.Mutex
	ended  bool // guarded by ending; conn must not be used after
}

func newAnswers(metrics prometheus.Registerer) *answers {
	a := &answers{maxBytes: maxWritten, making: make(chan struct{}, maxMade)}
	if metrics != nil {
		metrics.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: "srtm_lookup_answers_cut_total", Help: "HTTP answers cut short since their clients did not read them, and others asked for much.",
		}, func() float64 { return float64(a.cut.Load()) }))
	}
	return a
}

// listing answers with a full list, unless the client has left before its turn.
func (a *answers) listing(w http.ResponseWriter, r *http.Request, list func() any) {
	encoded := func() []byte {
		a.making <- struct{}{}
		defer func() { <-a.making }()
		if r.Context().Err() != nil {
			return nil
		}
		return encode(list())
	}()
	if encoded != nil {
		a.write(w, encoded)
	}
}

// reply answers with the data of one topic.
func (a *answers) reply(w http.ResponseWriter, body any) { a.write(w, encode(body)) }

func (a *answers) write(w http.ResponseWriter, encoded []byte) {
	if len(encoded) > uncounted {
		answer := &written{bytes: len(encoded), conn: http.NewResponseController(w)}
		for _, old := range a.begin(answer) {
			a.cut.Add(1)
			old.end(true)
		}
		defer a.finish(answer)
	}
	write(w, http.StatusOK, encoded)
}

// begin counts an answer and returns the older answers to cut short for it.
func (a *answers) begin(answer *written) (old []*written) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for a.mu.bytes > 0 && a.mu.bytes+answer.bytes > a.maxBytes {
		oldest := a.mu.oldestFirst.Front()
		a.dropLocked(oldest)
		old = append(old, oldest)
	}
	a.mu.oldestFirst.Push(&answer.place, answer)
	answer.counted = true
	a.mu.bytes += answer.bytes
	return old
}

// finish ends a written or cut answer.
func (a *answers) finish(answer *written) {
	a.mu.Lock()
	if answer.counted {
		a.dropLocked(answer)
	}
	a.mu.Unlock()
	answer.end(false)
}

// dropLocked stops counting an answer. Requires: mu is held and the answer is counted.
func (a *answers) dropLocked(answer *written) {
	answer.place.Remove()
	answer.counted = false
	a.mu.bytes -= answer.bytes
}

// end stops the use of the answer's connection. If short is true, end also makes the
// pending write fail.
func (a *written) end(short bool) {
	a.ending.Lock()
	defer a.ending.Unlock()
	if short && !a.ended {
		_ = a.conn.SetWriteDeadline(time.Unix(1, 0)) // otherwise the HTTP server owns the connection and its deadlines
	}
	a.ended = true
}

func encode(body any) []byte {
	encoded, err := json.Marshal(body)
	if err != nil {
		panic("lookup: an answer that does not encode: " + err.Error())
	}
	return encoded
}
