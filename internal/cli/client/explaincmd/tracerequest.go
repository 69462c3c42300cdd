package explaincmd

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/cli/client/asking"
	"github.com/fairlead/fairlead/internal/runner/api"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/trace/request"
)

// Bounds of a request that is traced, and of what nodes say about it.
const (
	// armTimeout bounds the time to tell the nodes; what is left of request.ArmedFor is for the request.
	armTimeout     = 4 * time.Second
	requestTimeout = 8 * time.Second
	maxBody        = 1 << 20 // bytes of the answer that are read
	// seenWithin bounds the wait for the nodes' reports after the answer: a node writes its report when the answer has ended.
	seenWithin = 2 * time.Second
	// seenAfter is the first pause between questions, each further one is twice as long: a question may forward a port.
	seenAfter = 100 * time.Millisecond
)

// requestFlags are the flags of a trace of a request.
type requestFlags struct {
	method, address, cacert string
	headers                 []string
	insecure                bool
}

func (f *requestFlags) add(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.StringVarP(&f.method, "request", "X", http.MethodGet, "of a URL: the method")
	flags.StringArrayVarP(&f.headers, "header", "H", nil, "of a URL: a header field, as 'NAME: VALUE'; may be given several times")
	flags.StringVar(&f.address, "address", "", "of a URL: send the request to this IP or IP:PORT, and not to what DNS says")
	flags.StringVar(&f.cacert, "cacert", "", "of a URL: a PEM file with the authorities of the server's certificate (default: the system's)")
	flags.BoolVarP(&f.insecure, "insecure", "k", false, "of a URL: do not verify the server's certificate")
}

// onlyForURLs returns a usage error if one of the flags is set for something else.
func onlyForURLs(cmd *cobra.Command) error {
	for _, name := range []string{"request", "header", "address", "cacert", "insecure"} {
		if cmd.Flags().Changed(name) {
			return base.Usagef("--%s is for a URL, http://HOST or https://HOST", name)
		}
	}
	return nil
}

func isURL(to string) bool {
	return strings.HasPrefix(to, "http://") || strings.HasPrefix(to, "https://")
}

// RequestReport is what 'fairlead trace URL' shows. Its JSON form is meant for programs: fields are only ever added.
type RequestReport struct {
	Method string `json:"method"`
	URL    string `json:"url"`
	// From and At are the ends of the connection; not valid without one.
	From netip.AddrPort `json:"from,omitzero"`
	At   netip.AddrPort `json:"at,omitzero"`
	// Error is why there is no answer.
	Error string `json:"error,omitempty"`
	// Status is the answer's, Protocol as HTTP/2.0, Location of a redirect.
	Status   int    `json:"status,omitempty"`
	Protocol string `json:"protocol,omitempty"`
	Location string `json:"location,omitempty"`
	// TLS is the version, Certificate the subject of the server's certificate; both empty without TLS.
	TLS         string  `json:"tls,omitempty"`
	Certificate string  `json:"certificate,omitempty"`
	Seconds     float64 `json:"seconds"`
	// Seen is what load balancers have seen of it, Problems why nodes could not be asked.
	Seen     []RequestSeen `json:"seen"`
	Asked    int           `json:"asked"`
	NotAsked int           `json:"notAsked,omitempty"`
	Problems []string      `json:"problems,omitempty"`
}

// RequestSeen is what the load balancer of a node has seen of a request.
type RequestSeen struct {
	Node string `json:"node"`
	request.Seen
	// Pods are the names of the Pods of Attempts, by their addresses, as far as the user may know them.
	Pods map[string]string `json:"pods,omitempty"`
}

// requesting is one request to trace.
type requesting struct {
	requestFlags
	to    *url.URL
	nodes *asking.Nodes
	id    string // of the trace
	ends  ends
}

// traceRequest sends a request to a URL from this machine, and reports what the load balancers have seen of it.
func (f *traceFlags) traceRequest(ctx context.Context, to string) (*RequestReport, error) {
	r := &requesting{requestFlags: f.request}
	var err error
	if r.to, err = url.Parse(to); err != nil || r.to.Host == "" {
		return nil, base.Usagef("TO is %q, which is not a URL with a host", to)
	}
	client, err := r.transport()
	if err != nil {
		return nil, err
	}
	q, err := r.request(ctx)
	if err != nil {
		return nil, err
	}
	nodes, _, err := userNodes(&f.ClientFlags)
	if err != nil {
		return nil, err
	}
	r.nodes = nodes.Balancers()
	out := &RequestReport{Method: q.Method, URL: r.to.Redacted(), Seen: []RequestSeen{}}
	armed, err := r.arm(ctx, out)
	if err != nil {
		return nil, err
	}
	out.send(client, q)
	out.From, out.At = r.ends.get()
	r.collect(ctx, armed, out)
	return out, nil
}

// request makes the request, with the trace ID that the load balancers look for (https://www.w3.org/TR/trace-context/).
func (r *requesting) request(ctx context.Context) (*http.Request, error) {
	q, err := http.NewRequestWithContext(ctx, r.method, r.to.String(), http.NoBody)
	if err != nil {
		return nil, base.Usagef("cannot make the request: %v", err)
	}
	for _, h := range r.headers {
		name, value, ok := strings.Cut(h, ":")
		if name = strings.TrimSpace(name); !ok || name == "" {
			return nil, base.Usagef("--header is %q; want 'NAME: VALUE'", h)
		}
		if value = strings.TrimSpace(value); strings.EqualFold(name, "Host") {
			q.Host = value
			continue
		}
		if strings.EqualFold(name, "Traceparent") {
			return nil, base.Usagef("--header is %q: the request has this field already, by which nodes know it", h)
		}
		q.Header.Add(name, value)
	}
	if q.Header.Get("User-Agent") == "" {
		q.Header.Set("User-Agent", "fairlead-trace")
	}
	var random [24]byte
	_, _ = rand.Read(random[:]) // never fails
	r.id = hex.EncodeToString(random[:16])
	q.Header.Set("Traceparent", "00-"+r.id+"-"+hex.EncodeToString(random[16:])+"-01")
	return q, nil
}

// transport returns a client for the one request. It follows no redirects.
func (r *requesting) transport() (*http.Client, error) {
	port := map[string]string{"http": "80", "https": "443"}[r.to.Scheme]
	if p := r.to.Port(); p != "" {
		port = p
	}
	at := ""
	if r.address != "" {
		if a, err := netip.ParseAddr(r.address); err == nil {
			at = net.JoinHostPort(a.String(), port)
		} else if _, err := netip.ParseAddrPort(r.address); err == nil {
			at = r.address
		} else {
			return nil, base.Usagef("--address is %q; want an IP or IP:PORT", r.address)
		}
	}
	config := &tls.Config{MinVersion: tls.VersionTLS12, InsecureSkipVerify: r.insecure} //nolint:gosec // with --insecure
	if r.cacert != "" {
		text, err := os.ReadFile(r.cacert)
		if err != nil {
			return nil, err
		}
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM(text) {
			return nil, fmt.Errorf("%s has no certificate in PEM", r.cacert)
		}
	}
	dialer := &net.Dialer{Timeout: requestTimeout}
	return &http.Client{
		Timeout:       requestTimeout,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		Transport: &http.Transport{
			TLSClientConfig: config, ForceAttemptHTTP2: true, DisableKeepAlives: true, DisableCompression: true,
			DialContext: func(ctx context.Context, network, to string) (net.Conn, error) {
				if at != "" {
					to = at
				}
				conn, err := dialer.DialContext(ctx, network, to)
				if err == nil {
					r.ends.note(conn)
				}
				return conn, err
			},
		},
	}, nil
}

// arm has nodes keep what becomes of the request, and returns which do.
func (r *requesting) arm(ctx context.Context, out *RequestReport) ([]string, error) {
	list, err := r.nodes.Client().CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, fmt.Errorf("cannot list Nodes to ask their load balancers: %w", err)
	}
	var names []string
	for i := range list.Items {
		names = append(names, list.Items[i].Name)
	}
	slices.Sort(names)
	out.NotAsked = max(len(names)-maxBalancers, 0)
	ctx, cancel := context.WithTimeout(ctx, armTimeout)
	defer cancel()
	var mu sync.Mutex
	var armed []string
	atOnce(names[:len(names)-out.NotAsked], func(_ int, node string) {
		_, err := r.ask(ctx, node, true)
		mu.Lock()
		defer mu.Unlock()
		if err != nil {
			out.Problems = append(out.Problems, "node "+node+": "+err.Error())
			return
		}
		armed = append(armed, node)
	})
	slices.Sort(armed)
	slices.Sort(out.Problems)
	out.Asked = len(armed)
	return armed, nil
}

// maxBalancers bounds the nodes that are asked.
const maxBalancers = 500

// ask asks a node for what it has seen of the request.
func (r *requesting) ask(ctx context.Context, node string, arm bool) ([]request.Seen, error) {
	query := url.Values{"id": {r.id}}
	if arm {
		query.Set("arm", "true")
	}
	text, err := r.nodes.Get(ctx, node, api.RequestView, query)
	if err != nil {
		return nil, errors.New(asking.WhyNot(err))
	}
	var answer api.RequestAnswer
	if err := json.Unmarshal(text, &answer); err != nil {
		return nil, fmt.Errorf("cannot use its answer: %w", err)
	}
	if !answer.Armed {
		return nil, errors.New("it no longer keeps the request")
	}
	list := answer.Requests[:min(len(answer.Requests), request.MaxSeen)]
	for i := range list {
		s := &list[i]
		if left := len(s.Attempts) - request.MaxAttempts; left > 0 {
			s.Attempts, s.More = s.Attempts[left:], s.More+left
		}
	}
	return list, nil
}

// send sends the request, and notes what the client gets.
func (out *RequestReport) send(client *http.Client, q *http.Request) {
	began := time.Now()
	answer, err := client.Do(q)
	defer func() { out.Seconds = time.Since(began).Seconds() }()
	if err != nil {
		var failed *url.Error
		if errors.As(err, &failed) {
			err = failed.Err
		}
		out.Error = err.Error()
		return
	}
	defer answer.Body.Close()
	out.Status, out.Protocol, out.Location = answer.StatusCode, answer.Proto, answer.Header.Get("Location")
	if answer.TLS != nil {
		out.TLS = tls.VersionName(answer.TLS.Version)
		if c := answer.TLS.PeerCertificates; len(c) > 0 {
			out.Certificate = strings.Join(append([]string{c[0].Subject.CommonName}, c[0].DNSNames...), ", ")
		}
	}
	if _, err := io.Copy(io.Discard, io.LimitReader(answer.Body, maxBody)); err != nil {
		out.Error = "the answer has broken off: " + err.Error()
	}
}

// collect asks the nodes until one has seen the request, and names the Pods.
func (r *requesting) collect(ctx context.Context, armed []string, out *RequestReport) {
	end := time.Now().Add(seenWithin)
	for pause := seenAfter; ; pause *= 2 {
		lists := make([][]request.Seen, len(armed))
		problems := make([]string, len(armed))
		atOnce(armed, func(i int, node string) {
			list, err := r.ask(ctx, node, false)
			if lists[i] = list; err != nil {
				problems[i] = "node " + node + ": " + err.Error()
			}
		})
		for i, list := range lists {
			for k := range list {
				out.Seen = append(out.Seen, RequestSeen{Node: armed[i], Seen: list[k], Pods: r.names(ctx, &list[k])})
			}
		}
		if len(out.Seen) > 0 || out.At == (netip.AddrPort{}) || time.Now().After(end) {
			out.Problems = append(out.Problems, slices.DeleteFunc(problems, func(p string) bool { return p == "" })...)
			break
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
	}
	slices.SortStableFunc(out.Seen, func(a, b RequestSeen) int { return a.Began.Compare(b.Began) })
}

// names finds the names of Pods by the EndpointSlices of the Service.
func (r *requesting) names(ctx context.Context, s *request.Seen) map[string]string {
	backend, err := svc.ParseName(s.Backend)
	if err != nil || len(s.Attempts) == 0 {
		return nil
	}
	list, err := r.nodes.Client().DiscoveryV1().EndpointSlices(backend.Namespace).List(ctx,
		metav1.ListOptions{LabelSelector: discoveryv1.LabelServiceName + "=" + backend.Name})
	if err != nil {
		return nil // the addresses are shown
	}
	out := map[string]string{}
	for i := range list.Items {
		for k := range list.Items[i].Endpoints {
			e := &list.Items[i].Endpoints[k]
			if e.TargetRef == nil || e.TargetRef.Kind != "Pod" || len(e.Addresses) == 0 {
				continue
			}
			at, err := netip.ParseAddr(e.Addresses[0])
			if err == nil && slices.ContainsFunc(s.Attempts, func(a request.Attempt) bool { return a.Pod.Addr() == at }) {
				out[at.String()] = e.TargetRef.Name
			}
		}
	}
	return out
}
