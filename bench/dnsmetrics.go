package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"time"
)

// metricsPort is where both servers of names show their metrics.
const metricsPort = 9153

// corednsPrefix begins the names of metrics that CoreDNS has.
const corednsPrefix = "coredns_"

// ownMetrics are the beginnings of metrics of CoreDNS that fairlead does not
// have, and why.
var ownMetrics = map[string]string{
	"coredns_build_info":              "fairlead version tells",
	"coredns_panics_total":            "a panic ends the process",
	"coredns_plugin_enabled":          "there are no plugins",
	"coredns_reload_":                 "there is no Corefile",
	"coredns_health_":                 "CoreDNS asks itself over HTTP",
	"coredns_kubernetes_rest_client_": "of client-go, one for the whole process",
	"coredns_hosts_":                  "only with --hosts",
	"coredns_local_":                  "localhost is a name like others",
	"coredns_dns_https":               "no questions over HTTPS are answered",
	"coredns_dns_quic":                "no questions over QUIC are answered",
}

var (
	metricLabel = regexp.MustCompile(`([a-z_]+)="`)
	metricPart  = regexp.MustCompile(`_(bucket|sum|count)$`)
)

// readMetrics gets the metrics of a server in a form to compare: for each name
// its kind and the names of its labels.
func readMetrics(ctx context.Context, at netip.Addr) (map[string]string, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+netip.AddrPortFrom(at, metricsPort).String()+"/metrics", nil)
	if err != nil {
		return nil, err
	}
	r, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer r.Body.Close()
	text, err := io.ReadAll(r.Body)
	if err != nil {
		return nil, err
	}
	if r.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s: %s", req.URL, r.Status)
	}
	return parseMetrics(string(text)), nil
}

// parseMetrics reads the text form of metrics.
func parseMetrics(text string) map[string]string {
	out, kinds := map[string]string{}, map[string]string{}
	for line := range strings.Lines(text) {
		if f := strings.Fields(line); len(f) == 4 && f[0] == "#" && f[1] == "TYPE" {
			kinds[f[2]] = f[3]
			continue
		}
		if strings.HasPrefix(line, "#") {
			continue
		}
		name := line[:strings.IndexAny(line+"\n", "{ \n")]
		if kinds[name] == "" {
			name = metricPart.ReplaceAllString(name, "")
		}
		var labels []string
		for _, m := range metricLabel.FindAllStringSubmatch(line, -1) {
			if m[1] != "le" { // of each bucket
				labels = append(labels, m[1])
			}
		}
		slices.Sort(labels)
		out[name] = kinds[name] + "{" + strings.Join(labels, ",") + "}"
	}
	return out
}

// compareMetrics returns an error for what both count under one name in two ways,
// and for what CoreDNS counts and fairlead does not, without a reason.
func compareMetrics(mine, theirs map[string]string) (same int, err error) {
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(theirs)) {
		if !strings.HasPrefix(name, corednsPrefix) {
			continue // of the Go runtime
		}
		switch {
		case mine[name] == theirs[name]:
			same++
		case mine[name] != "":
			errs = append(errs, fmt.Errorf("metric %s is %s, CoreDNS's %s", name, mine[name], theirs[name]))
		case !hasReason(name):
			errs = append(errs, fmt.Errorf("metric %s%s of CoreDNS is missing", name, theirs[name]))
		}
	}
	return same, errors.Join(errs...)
}

func hasReason(name string) bool {
	for prefix := range ownMetrics {
		if strings.HasPrefix(name, prefix) {
			return true
		}
	}
	return false
}
