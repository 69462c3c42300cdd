// Package nodecheck checks the rules of a proxy on the node that it runs on, for 'fairlead migrate': it compares the kernel with
// the API, and asks the proxy that has the port of health checks. It changes nothing.
package nodecheck

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"runtime"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/barrier"
	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/dataplane/kubeproxy"
	"github.com/fairlead/fairlead/internal/dataplane/nft"
	"github.com/fairlead/fairlead/internal/explain"
	"github.com/fairlead/fairlead/internal/table"
)

// Options are the options of Check.
type Options struct {
	Client kubernetes.Interface
	Node   string
	// Kernel compares the rules of mode nft with the API.
	Kernel bool
	// KubeProxy is the mode of the kube-proxy whose rules are compared with the API, empty for none.
	KubeProxy string
	// Healthz and Metrics are where the proxy of the node answers; not valid to ask nothing.
	Healthz, Metrics netip.AddrPort
	// Within is how long differences may last, since a change is on its way to the kernel for a moment.
	Within time.Duration
}

const (
	// attempts are this far apart.
	attempts = time.Second
	// requestTimeout bounds one request.
	requestTimeout = 10 * time.Second
	// maxDifferences bounds how many an error names.
	maxDifferences = 3
)

// Check returns nil as soon as all is as wanted, with how many were compared: frontends, or kube-proxy's endpoints. After Within the error
// names the difference.
func Check(ctx context.Context, o Options) (compared int, err error) {
	ctx, cancel := context.WithTimeout(ctx, o.Within)
	defer cancel()
	again := time.NewTicker(attempts)
	defer again.Stop()
	for {
		n, once := o.once(ctx)
		if once == nil {
			return n, nil
		}
		if ctx.Err() == nil || err == nil { // not the error of a request that was cut off
			err = once
		}
		select {
		case <-ctx.Done():
			return 0, err
		case <-again.C:
		}
	}
}

func (o *Options) once(ctx context.Context) (n int, err error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	if o.Healthz.IsValid() {
		if err := get(ctx, "http://"+o.Healthz.String()+"/healthz", nil); err != nil {
			return 0, fmt.Errorf("health check: %w", err)
		}
	}
	if o.Metrics.IsValid() {
		if err := get(ctx, "http://"+o.Metrics.String()+"/metrics", synced); err != nil {
			return 0, err
		}
	}
	switch {
	case o.Kernel:
		return o.compare(ctx)
	case o.KubeProxy != "":
		return o.compareKubeProxy(ctx)
	}
	return 0, nil
}

// compareKubeProxy looks for kube-proxy's rules for every endpoint that the node must have by the API.
func (o *Options) compareKubeProxy(ctx context.Context) (n int, err error) {
	t, err := o.wanted(ctx)
	if err != nil {
		return 0, err
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	n, missing, err := kubeproxy.Missing(o.KubeProxy, t)
	if err != nil || len(missing) == 0 {
		return n, err
	}
	return 0, fmt.Errorf("%d of %d endpoints differ from the API: %s", len(missing), n,
		strings.Join(missing[:min(len(missing), maxDifferences)], "; "))
}

// get makes a request to this node, and reads the answer.
func get(ctx context.Context, url string, read func(io.Reader) error) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	res, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(req)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		return fmt.Errorf("%s answers %s", url, res.Status)
	}
	if read == nil {
		return nil
	}
	return read(io.LimitReader(res.Body, 64<<20))
}

// lastSync is the metric with the time at which a proxy has written all of its rules, both of kube-proxy and of fairlead.
const lastSync = "kubeproxy_sync_proxy_rules_last_timestamp_seconds"

// synced reads metrics and reports whether every family has been written.
func synced(r io.Reader) error {
	found := false
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		rest, ok := strings.CutPrefix(lines.Text(), lastSync)
		if !ok {
			continue
		}
		at, err := strconv.ParseFloat(rest[strings.LastIndexByte(rest, ' ')+1:], 64)
		if err != nil || at <= 0 {
			return errors.New("the proxy has not written its rules yet")
		}
		found = true
	}
	if err := lines.Err(); err != nil {
		return err
	}
	if !found {
		return fmt.Errorf("the proxy has no metric %s: it has not written its rules yet", lastSync)
	}
	return nil
}

// compare reads back every frontend that the node must have by the API.
func (o *Options) compare(ctx context.Context) (n int, err error) {
	t, err := o.wanted(ctx)
	if err != nil {
		return 0, err
	}
	mode, err := nft.New(nft.Config{})
	if err != nil {
		return 0, err
	}
	defer mode.Close()
	var asked []dataplane.Asked
	var want []dataplane.Installed
	for p := range t.All() {
		for i := range p.Frontends {
			// Which clients count as this node's depends on flags of the proxy; all others meet the same endpoints with any.
			e := dataplane.Expected(p, &p.Frontends[i])
			e.Inside = nil
			asked, want = append(asked, dataplane.AskedOf(t, p, &p.Frontends[i])), append(want, e)
		}
	}
	has, err := mode.Look(ctx, asked, netip.Addr{})
	if err != nil {
		return 0, err
	}
	var differ []string
	for i := range has {
		has[i].Inside = nil
		if d := has[i].Differs(&want[i]); d != "" {
			differ = append(differ, want[i].Front+": "+d)
		}
	}
	if len(differ) == 0 {
		return len(asked), nil
	}
	return 0, fmt.Errorf("%d of %d frontends differ from the API: %s", len(differ), len(asked),
		strings.Join(differ[:min(len(differ), maxDifferences)], "; "))
}

// wanted is the Table of the node by the API.
func (o *Options) wanted(ctx context.Context) (*table.Table, error) {
	node, err := o.Client.CoreV1().Nodes().Get(ctx, o.Node, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	services, err := o.Client.CoreV1().Services("").List(ctx, metav1.ListOptions{LabelSelector: barrier.ProxySelector})
	if err != nil {
		return nil, err
	}
	slices, err := o.Client.DiscoveryV1().EndpointSlices("").List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	var ss []*corev1.Service
	for i := range services.Items {
		ss = append(ss, &services.Items[i])
	}
	var es []*discoveryv1.EndpointSlice
	for i := range slices.Items {
		es = append(es, &slices.Items[i])
	}
	return explain.Build(&explain.Cluster{}, o.Node, node, ss, es), nil
}
