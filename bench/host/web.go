package host

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"
)

var client = http.Client{Timeout: time.Minute} // a busy control plane may be slow

// get passes the response body of a URL to read.
func get(ctx context.Context, url string, read func(io.Reader) error) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if err := read(resp.Body); err != nil {
		return fmt.Errorf("%s: %w", url, err)
	}
	return nil
}

// Depth returns the depth of a topic on a broker, or 0 before the first message.
func Depth(ctx context.Context, web, topic string) (int64, error) {
	var stats struct{ Topics []struct{ Depth int64 } }
	err := get(ctx, "http://"+web+"/stats?format=json&include_clients=false&topic="+topic, func(r io.Reader) error {
		return json.NewDecoder(r).Decode(&stats)
	})
	if err != nil || len(stats.Topics) == 0 {
		return 0, err
	}
	return stats.Topics[0].Depth, nil
}

// Metrics returns the metrics of a process, by name with labels. web is the host:port of
// its HTTP server.
func Metrics(ctx context.Context, web string) (map[string]float64, error) {
	values := make(map[string]float64)
	err := get(ctx, "http://"+web+"/metrics", func(r io.Reader) error {
		lines := bufio.NewScanner(r)
		for lines.Scan() {
			name, text, _ := strings.Cut(lines.Text(), " ")
			if v, err := strconv.ParseFloat(text, 64); err == nil {
				values[name] = v
			}
		}
		return lines.Err()
	})
	return values, err
}
