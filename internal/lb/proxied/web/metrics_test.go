package web

import (
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/lb/proxied/lbtest"
	"github.com/fairlead/fairlead/internal/testbed"
)

// metrics returns the metrics of the Server as text.
func (r *rig) metrics() string {
	r.Helper()
	return lbtest.Metrics(r, r.server.Collector())
}

// shows waits until the metrics have all of these lines. "some" stands for more than 0.
func (r *rig) shows(lines ...string) {
	r.Helper()
	testbed.Until(r, "metrics", func() error {
		text := r.metrics()
		for _, l := range lines {
			some, is := strings.CutSuffix(l, " some")
			if is && (!strings.Contains(text, some) || strings.Contains(text, some+" 0\n")) || !is && !strings.Contains(text, l+"\n") {
				return fmt.Errorf("no %q in %s", l, text)
			}
		}
		return nil
	})
}

// What clients ask for is counted by HTTP/1.1 and HTTP/2 alike: requests by class, bytes, retries, failures and Pods that
// are left out. Requests that no Pod gets count for the Service only.
func TestRequestsAreCounted(t *testing.T) {
	const of = `namespace="default",service="web"`
	for _, version := range []int{1, 2} {
		t.Run(fmt.Sprint("HTTP/", version), func(t *testing.T) {
			r := newRig(t, map[string]string{lbProtocol: "http", "fairlead.dev/lb-eject": "errors=2"})
			pod := r.Web(func(w http.ResponseWriter, q *http.Request) {
				switch q.URL.Path {
				case "/missing":
					w.WriteHeader(http.StatusNotFound)
				case "/cut":
					panic(http.ErrAbortHandler)
				}
				n, _ := io.Copy(io.Discard, q.Body)
				_, _ = io.WriteString(w, strings.Repeat("x", int(n)*2))
			})
			gone := r.Free()
			r.set(pod, gone)
			client := r.clientOf(version)
			for _, path := range []string{"/", "/missing", "/", "/cut", "/cut"} {
				answer, err := client.Post("http://"+r.At.String()+path, "text/plain", strings.NewReader("12345"))
				r.Must(err)
				_, _ = io.Copy(io.Discard, answer.Body)
				r.Must(answer.Body.Close())
			}
			end := `,` + of + `}`
			at := func(p netip.AddrPort) string { return `endpoint="` + p.String() + `"` }
			r.shows(
				"fairlead_lb_requests_total{class=\"2xx\""+end+" 2", "fairlead_lb_requests_total{class=\"4xx\""+end+" 1",
				"fairlead_lb_requests_total{class=\"5xx\""+end+" 2", "fairlead_lb_request_duration_seconds_count{"+of+"} 5",
				"fairlead_lb_bytes_total{"+of+",to=\"endpoints\"} 25", "fairlead_lb_retries_total{"+of+"} some",
				"fairlead_lb_connections_total{"+of+"} 1", "fairlead_lb_open_connections{"+of+"} 1",
				"fairlead_lb_endpoint_requests_total{class=\"2xx\","+at(pod)+end+" 2",
				"fairlead_lb_endpoint_requests_total{class=\"none\","+at(pod)+end+" 2",
				"fairlead_lb_endpoint_connections{"+at(pod)+end+" 0",
				"fairlead_lb_endpoint_bytes_total{"+at(pod)+","+of+",to=\"endpoints\"} 15",
				"fairlead_lb_endpoint_bytes_total{"+at(pod)+","+of+",to=\"clients\"} 30",
				"fairlead_lb_endpoint_answer_duration_seconds_count{"+at(pod)+end+" 3",
				"fairlead_lb_endpoint_answer_duration_seconds_bucket{"+at(pod)+","+of+",le=\"+Inf\"} 3",
				"fairlead_lb_endpoint_retries_total{"+at(gone)+end+" some", "fairlead_lb_endpoint_retries_total{"+at(pod)+end+" 0",
				"fairlead_lb_endpoint_healthy{"+at(gone)+end+" 0",
				"fairlead_lb_endpoint_failures_total{"+at(gone)+end+" some", "fairlead_lb_endpoint_ejections_total{"+at(gone)+end+" some",
			)
			if text := r.metrics(); strings.Contains(text, "fairlead_lb_endpoint_requests_total{class=\"2xx\","+at(gone)) {
				t.Error("requests are counted for a Pod that has none")
			}
			r.service.Addrs = nil
			if failed := r.server.Set(nil); len(failed) > 0 {
				t.Fatal(failed)
			}
			if text := r.metrics(); strings.Contains(text, "fairlead_lb_") {
				t.Errorf("the Service is gone, and there is %s", text)
			}
		})
	}
}
