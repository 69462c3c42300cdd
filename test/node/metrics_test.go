package node

import (
	"fmt"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// The metrics of an agent have series of the proxy, of DNS, of its speaker and of Pods, which go
// with their Pod. Dashboards for kube-proxy, CoreDNS and Hubble have data.
func TestMetricsOfAnAgent(t *testing.T) {
	t.Parallel()
	const upstream = "192.168.77.13"                // the third host
	c := newCluster(t, "--lb-pool", "192.0.2.0/28", // as the server has it, with one list of flags for all
		"--upstream", upstream, "--hubble-listen-address", "unix://"+filepath.Join(openDir(t), "hubble.sock"))
	if at := world(t, c.network.Outside("world")); at.Addr().String() != upstream {
		t.Fatalf("the outside is at %s", at)
	}
	c.agent.Says("--lb-pool has no effect on a node: the server gives out addresses")
	c.backends()
	c.kubectl("run", "loops", "--image=host", "--command", "--", "false")
	process.Output(
		t,
		c.node.Command(t.Context(), "dig", "+short", "+time=2", "+tries=5", "@"+clusterDNS, "kubernetes.default.svc.cluster.local"),
	)
	scrape := func(port string) string {
		return process.Output(t, c.node.Command(t.Context(), "curl", "-sSf", "--max-time", "10", "http://127.0.0.1:"+port+"/metrics"))
	}
	has := func(port string, patterns ...string) {
		t.Helper()
		testbed.Until(t, "the series of port "+port, func() error {
			text := scrape(port)
			for _, p := range patterns {
				if !regexp.MustCompile("(?m)^" + p).MatchString(text) {
					return fmt.Errorf("no %s in\n%s", p, text)
				}
			}
			return nil
		})
	}
	const probes = `prober_probe_total\{container="main",namespace="default",pod="myapp-\w+",pod_uid="[^"]+",` +
		`probe_type="Readiness",result="successful"\} [1-9]`
	has(
		"10249",
		`kubeproxy_`,
		`fairlead_runner_pods\{phase="Running"\} [23]$`,
		`kubelet_running_containers\{container_state="running"\} [23]$`,
		`kubelet_started_pods_total 3$`,
		`kubelet_started_containers_total\{container_type="container"\} ([4-9]|\d\d)`,
		`fairlead_runner_container_restarts_total [1-9]`,
		probes,
		`prober_probe_duration_seconds_count\{.*probe_type="Readiness"\} [1-9]`,
		`fairlead_lb_speaker_addresses 0$`,
		`fairlead_lb_speaker_voters 1$`,
		`fairlead_lb_speaker_voters_reached 1$`,
		`fairlead_lb_speaker_taken_total 0$`,
		`fairlead_lb_speaker_conflicts_total 0$`,
		`fairlead_lb_speaker_messages_sent_total \d`,
		`fairlead_lb_speaker_rejected_connections_total 0$`,
		`fairlead_lb_speaker_panics_total 0$`,
	)
	has("9153", `coredns_dns_requests_total\{.*\} [1-9]`, `fairlead_dns_api_up`)

	c.apply(mustRead(t, "../../examples/debugging.yaml"))
	(&shell{c: c}).applications()
	c.dashboardsHaveData(upstream)

	c.kubectl("delete", "pods", "-l", "app=MyApp")
	testbed.Until(t, "the end of the series of Pods that are gone", func() error {
		if text := scrape("10249"); strings.Contains(text, `pod="myapp-`) {
			return fmt.Errorf("%s", text)
		}
		return nil
	})
}
