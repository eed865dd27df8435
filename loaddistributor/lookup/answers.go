package lookup

import (
	"encoding/json"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/srtm-io/srtm/internal/list"
)

const (
	// maxWritten bounds the bytes of all answers that are being written, but for the newest.
	maxWritten = 128 << 20
	// uncounted is the size of an answer up to which its connection costs more than it.
	uncounted = 4 << 10
	// maxMade bounds the lists of everything that are being made.
	maxMade = 2
)

// answers bounds what clients cost that ask for much and do not read it: a list of 100,000
// topics on six brokers has 13 MB, and over HTTP/2 one connection may ask for hundreds at a
// time. Where there are too many, the oldest is cut short. A client that reads has its
// answer by then; to have new ones wait would let clients that do not read keep others out.
type answers struct {
	// Set once.
	most   int           // bytes
	making chan struct{} // has an element for each list that is being made

	cut atomic.Uint64 // written by the answers that cut, read for metrics

	mu struct {
		sync.Mutex
		bytes int                 // of those that are being written
		all   list.List[*written] // the oldest in front
	}
}

// written is an answer that is being written.
type written struct {
	// Set once.
	bytes int
	conn  *http.ResponseController

	// Guarded by answers.mu.
	place   list.Element[*written]
	counted bool

	ending sync.Mutex
	ended  bool // guarded by ending: conn must not be used any more
}

func newAnswers(metrics prometheus.Registerer) *answers {
	a := &answers{most: maxWritten, making: make(chan struct{}, maxMade)}
	if metrics != nil {
		metrics.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: "srtm_lookup_answers_cut_total", Help: "HTTP answers cut short since their clients did not read them, and others asked for much.",
		}, func() float64 { return float64(a.cut.Load()) }))
	}
	return a
}

// listing answers with a list of everything there is, unless the client is gone by its turn.
func (a *answers) listing(w http.ResponseWriter, r *http.Request, all func() any) {
	encoded := func() []byte {
		a.making <- struct{}{}
		defer func() { <-a.making }()
		if r.Context().Err() != nil {
			return nil
		}
		return encode(all())
	}()
	if encoded != nil {
		a.write(w, encoded)
	}
}

// reply answers with what is of one topic.
func (a *answers) reply(w http.ResponseWriter, body any) { a.write(w, encode(body)) }

func (a *answers) write(w http.ResponseWriter, encoded []byte) {
	if len(encoded) > uncounted {
		one := &written{bytes: len(encoded), conn: http.NewResponseController(w)}
		for _, old := range a.begin(one) {
			a.cut.Add(1)
			old.end(true)
		}
		defer a.over(one)
	}
	write(w, http.StatusOK, encoded)
}

// begin counts an answer, and returns those that are to be cut short for it.
func (a *answers) begin(one *written) (old []*written) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for a.mu.bytes > 0 && a.mu.bytes+one.bytes > a.most {
		oldest := a.mu.all.Front()
		a.takeLocked(oldest)
		old = append(old, oldest)
	}
	a.mu.all.Push(&one.place, one)
	one.counted = true
	a.mu.bytes += one.bytes
	return old
}

// over is for one that has been written, or was cut short.
func (a *answers) over(one *written) {
	a.mu.Lock()
	if one.counted {
		a.takeLocked(one)
	}
	a.mu.Unlock()
	one.end(false)
}

// takeLocked requires mu held, and one to be counted.
func (a *answers) takeLocked(one *written) {
	one.place.Remove()
	one.counted = false
	a.mu.bytes -= one.bytes
}

// end sees to it that the answer's connection is not used any more; short: and that its write fails.
func (one *written) end(short bool) {
	one.ending.Lock()
	defer one.ending.Unlock()
	if short && !one.ended {
		_ = one.conn.SetWriteDeadline(time.Unix(1, 0)) // its server has write deadlines, and it is not ours otherwise
	}
	one.ended = true
}

func encode(body any) []byte {
	encoded, err := json.Marshal(body)
	if err != nil {
		panic("lookup: an answer that does not encode: " + err.Error())
	}
	return encoded
}
