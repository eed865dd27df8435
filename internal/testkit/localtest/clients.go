package localtest

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nsqio/go-nsq"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/service"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/topics"
)

// Consume makes a stock consumer read a channel from brokers, or from the brokers of
// lookup services if from are URLs. It ends at stop or at the test's end. set, unless
// nil, changes its configuration.
func Consume(t testing.TB, topic, channel string, handler nsq.Handler, set func(*nsq.Config), addresses ...string) (stop func()) {
	t.Helper()
	config := nsq.NewConfig()
	if set != nil {
		set(config)
	}
	c, err := nsq.NewConsumer(topic, channel, config)
	testkit.Must(t, err)
	c.SetLogger(nil, nsq.LogLevelMax)
	c.AddHandler(handler)
	connect := c.ConnectToNSQDs
	if strings.HasPrefix(addresses[0], "http://") {
		connect = c.ConnectToNSQLookupds
	}
	testkit.Must(t, connect(addresses))
	stop = sync.OnceFunc(func() {
		c.Stop()
		<-c.StopChan
	})
	t.Cleanup(stop)
	return stop
}

// Bodies is a handler that keeps message bodies for Want.
type Bodies chan string

// HandleMessage keeps a body.
func (b Bodies) HandleMessage(m *nsq.Message) error {
	b <- string(m.Body)
	return nil
}

// Want waits until all wanted bodies have arrived.
func (b Bodies) Want(t testing.TB, want ...string) {
	t.Helper()
	missing := map[string]bool{}
	for _, body := range want {
		missing[body] = true
	}
	limit := time.NewTimer(testkit.Hang)
	defer limit.Stop()
	for len(missing) > 0 {
		select {
		case body := <-b:
			delete(missing, body)
		case <-limit.C:
			t.Fatalf("%d of %d messages have not come", len(missing), len(want))
		}
	}
}

// Producer connects a stock producer with a client id until the test ends.
func Producer(t testing.TB, address, id string) *nsq.Producer {
	t.Helper()
	p, err := NewProducer(address, id)
	testkit.Must(t, err)
	t.Cleanup(p.Stop)
	return p
}

// NewProducer is Producer for any goroutine. The caller stops the producer.
func NewProducer(address, id string) (*nsq.Producer, error) {
	config := nsq.NewConfig()
	config.ClientID = id
	p, err := nsq.NewProducer(address, config)
	if err == nil {
		p.SetLogger(nil, nsq.LogLevelMax)
	}
	return p, err
}

// Command runs a program to its end. It returns the output and the exit code, -1 if the
// program did not end by itself.
func Command(t testing.TB, program string, args ...string) (output string, code int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), local.Patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Dir = t.TempDir()
	text, err := cmd.CombinedOutput()
	if exit := new(exec.ExitError); err != nil && !errors.As(err, &exit) {
		t.Fatalf("%s %q: %v", program, args, err)
	}
	return string(text), cmd.ProcessState.ExitCode()
}

// Srtm runs an srtm command on a cluster. The command must succeed.
func Srtm(t testing.TB, rpc string, args ...string) {
	t.Helper()
	if output, code := Command(t, Program(t, "tools/srtm"), append(args, "--loaddistributor-address="+rpc)...); code != 0 {
		t.Fatalf("srtm %q: exit code %d\n%s", args, code, output)
	}
}

// Dial returns a connection to one or several loaddistributors or tbadaptors until the
// test ends.
func Dial(t testing.TB, rpc string) *grpc.ClientConn {
	t.Helper()
	conn, err := service.Dial(rpc, grpc.WithTransportCredentials(insecure.NewCredentials()))
	testkit.Must(t, err)
	t.Cleanup(func() { _ = conn.Close() }) // there is nothing to lose
	return conn
}

// CreateTopic creates a topic and returns the placed topic.
func CreateTopic(ctx context.Context, conn grpc.ClientConnInterface, request *srtmv1.CreateTopicRequest, options ...grpc.CallOption) (*srtmv1.Topic, error) {
	return topics.Create(ctx, srtmv1.NewAdminServiceClient(conn), request, nil, options...)
}

// Metric returns the present value of a process's metric, summed over its labels.
func Metric(p *local.Process, name string) (sum float64, err error) {
	text, _, err := Ask(http.MethodGet, "http://"+p.HTTP+"/metrics", "")
	found := false
	for line := range strings.Lines(text) {
		rest, ok := strings.CutPrefix(strings.TrimSpace(line), name)
		if !ok || rest[0] != ' ' && rest[0] != '{' {
			continue
		}
		v, err := strconv.ParseFloat(rest[strings.LastIndexByte(rest, ' ')+1:], 64)
		if err != nil {
			return 0, err
		}
		sum, found = sum+v, true
	}
	if err == nil && !found {
		err = fmt.Errorf("there is no metric %s", name)
	}
	return sum, err
}
