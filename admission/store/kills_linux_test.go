package store_test

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/srtm-io/srtm/admission/client"
	"github.com/srtm-io/srtm/admission/rule"
	"github.com/srtm-io/srtm/admission/server"
	"github.com/srtm-io/srtm/admission/store"
	"github.com/srtm-io/srtm/admission/table"
	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
	"github.com/srtm-io/srtm/tokenbucket"
)

// processEnv makes the test program a server, with a store, a UDP address and a gRPC address. The
// server stops at a given point until the test lets it continue.
const processEnv = "SRTM_TEST_ADMISSION_PROCESS"

func TestMain(m *testing.M) {
	if of := strings.Fields(os.Getenv(processEnv)); len(of) == 4 {
		panic(process(of[0], of[1], of[2], of[3]))
	}
	testkit.Main(m)
}

// stepping is a store whose server reports what it has saved and sent, and then stops.
type stepping struct {
	*store.Store
	point string
	once  sync.Once
	ended mono.Time // time of the last checkpoint's batch
}

var saying sync.Mutex

func say(words ...any) {
	saying.Lock()
	defer saying.Unlock()
	fmt.Println(words...)
}

func (s *stepping) at(point string) {
	if point == s.point {
		s.once.Do(func() {
			say("at", point)
			bufio.NewReader(os.Stdin).ReadString('\n')
		})
	}
}

func (s *stepping) SaveCredits(ctx context.Context, me store.Member, owners uint64, credits []table.Credit) error {
	err := s.Store.SaveCredits(ctx, me, owners, credits)
	if err == nil && slices.ContainsFunc(credits, func(c table.Credit) bool { return c.Key == "key" }) {
		say("saved", int64(s.ended)) // everything admitted before is saved
	}
	s.ended = clock.Mono()
	return err
}

func (s *stepping) Claim(ctx context.Context, me, from, follower store.Member, wall time.Duration) (time.Duration, error) {
	s.at("claim")
	floor, err := s.Store.Claim(context.WithoutCancel(ctx), me, from, follower, wall)
	s.at("claimed")
	return floor, err
}

func (s *stepping) HandOver(ctx context.Context, me store.Member, to string, partitions []int, credits []table.Credit) error {
	s.at("move")
	err := s.Store.HandOver(context.WithoutCancel(ctx), me, to, partitions, credits)
	s.at("moved")
	return err
}

// reporting is a connection to a follower.
type reporting struct {
	srtmv1.AdmissionReplicationClient
	ended mono.Time // time of the last exchange
}

func (l *reporting) Replicate(ctx context.Context, q *srtmv1.ReplicateRequest, options ...grpc.CallOption) (*srtmv1.ReplicateResponse, error) {
	a, err := l.AdmissionReplicationClient.Replicate(ctx, q, options...)
	if err == nil {
		say("sent", int64(l.ended)) // everything admitted before is sent
	}
	l.ended = clock.Mono()
	return a, err
}

func process(url, udp, rpc, point string) error {
	db, err := store.Open(context.Background(), url)
	if err != nil {
		return err
	}
	ln, err := net.Listen("tcp", rpc)
	if err != nil {
		return err
	}
	s, err := server.New(context.Background(), server.Config{
		Address: udp, Store: server.NewStore(&stepping{Store: db, point: point}), Renew: 500 * time.Millisecond, Replicate: rpc,
		Dial: func(address string) (srtmv1.AdmissionReplicationClient, func() error, error) {
			conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
			return &reporting{AdmissionReplicationClient: srtmv1.NewAdmissionReplicationClient(conn)}, conn.Close, err
		},
	})
	if err != nil {
		return err
	}
	g := grpc.NewServer()
	srtmv1.RegisterAdmissionReplicationServer(g, s)
	go func() { _ = g.Serve(ln) }()
	return s.Run(context.Background())
}

// child is a server in its own process.
type child struct {
	cmd    *exec.Cmd
	goOn   func()
	ended  sync.WaitGroup
	client *client.Client

	mu          sync.Mutex
	at          string
	saved, sent mono.Time // everything admitted before is saved, or with the follower
}

func (c *child) known(checkpoint bool) mono.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	if checkpoint {
		return c.saved
	}
	return max(c.saved, c.sent)
}

func (c *child) is(point string) func() bool {
	return func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.at == point
	}
}

func (c *child) kill() {
	c.cmd.Process.Kill()
	c.ended.Wait()
	c.cmd.Wait()
}

// scene is two server processes on one store. The test uses two keys.
type scene struct {
	t        *testing.T
	url      string
	db       *store.Store
	ports    []string
	servers  [2]*child
	admitted map[string][]mono.Time // times of the answers
	left     map[string]int64       // from the last answer
}

const much = 100_000 // credits of a key that earns one credit in 1000 s

func newScene(t *testing.T, url string) *scene {
	t.Helper()
	db := testkit.Result(store.Open(t.Context(), url)).Must(t)
	t.Cleanup(func() { db.Close() })
	share := tokenbucket.Share{Rate: 1, Burst: much}
	_, err := db.SetRules(t.Context(), []rule.Rule{{Key: "key", Share: share}, {Key: "strict", Share: share, Strict: true}})
	testkit.Must(t, err)
	return &scene{t: t, url: url, db: db, ports: localtest.Ports(t, 4), admitted: map[string][]mono.Time{}, left: map[string]int64{}}
}

func (s *scene) start(i int, point string) {
	s.t.Helper()
	c := &child{cmd: exec.Command(os.Args[0])}
	c.cmd.Env = append(os.Environ(), processEnv+"="+strings.Join([]string{s.url, s.ports[i], s.ports[i+2], point}, " "))
	c.cmd.Stderr = os.Stderr
	in := testkit.Result(c.cmd.StdinPipe()).Must(s.t)
	out := testkit.Result(c.cmd.StdoutPipe()).Must(s.t)
	testkit.Must(s.t, c.cmd.Start())
	c.goOn = func() { fmt.Fprintln(in) }
	c.ended.Go(func() {
		for lines := bufio.NewScanner(out); lines.Scan(); {
			what, value, _ := strings.Cut(lines.Text(), " ")
			n, _ := strconv.ParseInt(value, 10, 64)
			c.mu.Lock()
			switch what {
			case "at":
				c.at = value
			case "saved":
				c.saved = mono.Time(n)
			case "sent":
				c.sent = mono.Time(n)
			}
			c.mu.Unlock()
		}
	})
	s.t.Cleanup(c.kill)
	c.client = testkit.Result(client.New(client.Config{Servers: []string{s.ports[i]}})).Must(s.t)
	s.t.Cleanup(c.client.Close)
	s.servers[i] = c
}

// ask sends a question to both servers, and reports whether the owner answered.
func (s *scene) ask(key string) bool {
	for _, c := range s.servers {
		if c == nil {
			continue
		}
		d := c.client.Ask(s.t.Context(), key, 1)
		if d.Unanswered {
			continue
		}
		if s.left[key] = 0; d.Admit {
			s.admitted[key] = append(s.admitted[key], clock.Mono())
			s.left[key] = d.Left
		}
		return true
	}
	return false
}

// askUntil repeats questions for both keys until a condition holds.
func (s *scene) askUntil(what string, is func() bool) {
	s.t.Helper()
	testkit.WaitFor(s.t, what, func() bool {
		s.ask("strict")
		return s.ask("key") && is() || is()
	})
}

// since counts the admissions of key after a time.
func (s *scene) since(at mono.Time) int {
	return len(s.admitted["key"]) - slices.IndexFunc(append(slices.Clone(s.admitted["key"]), mono.Time(1<<62)), func(t mono.Time) bool { return t > at })
}

// kill -9 of the owner, its follower, both, or PostgreSQL, at each step of a hand-over and of a claim.
// A strict key is never above its rule. Another key is above its rule by at most the key's admissions
// since the last replication, or since the last save if the follower is killed before the claim.
func TestKillsKeepKeysWithinTheirRules(t *testing.T) {
	t.Parallel()
	shared, _, _ := testkit.PostgreSQL(t, "")
	t.Run("each", func(t *testing.T) {
		for _, test := range []struct {
			name   string
			before string // kills before the point: o owner, f follower, p PostgreSQL
			by     int    // the server that comes to the point; 0 is the owner
			point  string
			kills  string // kills at the point
		}{
			{"owner", "", 0, "-", "o"},
			{"follower", "", 0, "-", "f"},
			{"both", "", 0, "-", "of"},
			{"PostgreSQL", "", 0, "-", "p"},
			{"owner as it moves", "", 0, "move", "o"},
			{"follower as it moves there", "", 0, "move", "f"},
			{"both as it moves", "", 0, "move", "of"},
			{"PostgreSQL as it moves", "", 0, "move", "p"},
			{"owner when it has moved", "", 0, "moved", "o"},
			{"follower when it has moved there", "", 0, "moved", "f"},
			{"PostgreSQL when it has moved", "", 0, "moved", "p"},
			{"follower as it claims", "o", 1, "claim", "f"},
			{"PostgreSQL as it claims", "o", 1, "claim", "p"},
			{"follower when it has claimed", "o", 1, "claimed", "f"},
			{"PostgreSQL when it has claimed", "o", 1, "claimed", "p"},
		} {
			t.Run(test.name, func(t *testing.T) {
				if !slices.Contains([]string{"owner", "follower when it has claimed"}, test.name) && os.Getenv("SRTM_FAULTS") == "" {
					t.Skip("SRTM_FAULTS is not set: only some steps")
				}
				t.Parallel()
				var url string
				kill, start := func() {}, func() {}
				if strings.Contains(test.kills, "p") {
					url, kill, start = testkit.PostgreSQL(t, "")
				} else {
					url = another(t, shared, fmt.Sprint("db", time.Now().UnixNano()))
				}
				s := newScene(t, url)
				over := s.play(test.before, test.by, test.point, test.kills, kill, start)
				t.Logf("%d of %d admitted above the rule", over, len(s.admitted["key"]))
			})
		}
	})
}

// another creates a second database beside the first.
func another(t *testing.T, url, name string) string {
	t.Helper()
	_, dir, _ := strings.Cut(url, "&host=")
	if out, err := exec.Command("psql", "-h", dir, "-U", "srtm", "-c", "CREATE DATABASE "+name, "postgres").CombinedOutput(); err != nil {
		t.Fatalf("psql: %v\n%s", err, out)
	}
	return strings.Replace(url, "/postgres?", "/"+name+"?", 1)
}

func (s *scene) play(before string, by int, point, kills string, killStore, startStore func()) (over int64) {
	t := s.t
	at := [2]string{"-", "-"}
	at[by] = point
	s.start(0, at[0])
	s.askUntil("the owner answers", func() bool { return len(s.admitted["strict"]) > 0 && len(s.admitted["key"]) > 0 })
	s.start(1, at[1])
	followed := func() bool {
		s.servers[0].mu.Lock()
		defer s.servers[0].mu.Unlock()
		return s.servers[0].sent != 0 && s.servers[0].saved != 0
	}
	s.askUntil("the owner has a follower", followed)
	n := len(s.admitted["key"])
	s.askUntil("requests", func() bool { return len(s.admitted["key"]) > n+300 })

	most := 0 // maximum that may be admitted above the rule
	both := strings.Contains(before+kills, "o") && strings.Contains(before+kills, "f")
	do := func(kills string) {
		for _, who := range kills {
			switch who {
			case 'o':
				s.servers[0].kill()
				// A server at its claim has saved everything from the owner.
				most += s.since(s.servers[0].known(both && !strings.HasPrefix(point, "claim")))
			case 'f':
				s.servers[1].kill()
				if point == "moved" { // the server had become the owner
					most += s.since(s.servers[1].known(true))
				}
			case 'p':
				killStore()
			}
		}
	}
	do(before)
	if point == "move" || point == "moved" {
		testkit.Must(t, s.db.Move(t.Context(), 0, rule.Partitions-1, s.ports[1]))
	}
	if point != "-" {
		s.askUntil("a server comes to "+point, s.servers[by].is(point))
	}
	do(kills)
	if strings.Contains(kills, "p") {
		if !s.ask("key") && before == "" && point == "-" {
			t.Log("no answer without the store") // the test machine was busy
		}
		startStore()
	}
	s.servers[by].goOn()
	n, strict := len(s.admitted["key"]), len(s.admitted["strict"])
	if both {
		s.start(0, "-")
		s.start(1, "-")
	} else if strings.Contains(before+kills, "f") && point == "moved" {
		s.start(1, "-")
	}
	s.askUntil("a server answers", func() bool { return len(s.admitted["key"]) > n+50 })
	if !strings.ContainsAny(before+kills, "of") {
		s.askUntil("strict keys are admitted", func() bool { return len(s.admitted["strict"]) > strict+10 })
	}
	if n := int64(len(s.admitted["strict"])) + s.left["strict"]; n > much {
		t.Errorf("a strict key: %d admitted and %d left of %d", len(s.admitted["strict"]), s.left["strict"], much)
	}
	over = max(0, int64(len(s.admitted["key"]))+s.left["key"]-much)
	if over > int64(most) {
		t.Errorf("%d were admitted above the rule, and since they were known elsewhere %d", over, most)
	}
	t.Logf("%d since they were known elsewhere", most)
	return over
}
