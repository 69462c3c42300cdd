package main

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

const (
	replicas = 3
	requests = 300
	// leastShare and mostShare bound what one of three backends gets of 300
	// requests under a uniform choice: more than six standard deviations away
	// from 100 (8.2 each).
	leastShare, mostShare = 50, 150
)

// apply creates the Service and reads its address.
func (s *stage) apply() error {
	out, err := s.kubectl("apply", "-f", s.manifest)
	if err != nil {
		return err
	}
	if s.clusterAddr, err = s.kubectl("get", "svc", "my-service", "-o", "jsonpath={.spec.clusterIP}"); err != nil {
		return err
	}
	line("kubectl apply -f "+s.manifest, "%s, ClusterIP %s", out, s.clusterAddr)
	return nil
}

// backends starts three Pods behind the Service and one to ask from.
func (s *stage) backends() error {
	begin := time.Now()
	fairlead, backend := filepath.Join(s.bin, "fairlead"), filepath.Join(s.bin, "backend")
	if _, err := s.on("node1", fairlead, "run", "-d", "-l", "app=MyApp", "-p", "http=9376", "--replicas", fmt.Sprint(replicas),
		"--ready", "http://:9376/healthz", "--", backend); err != nil {
		return err
	}
	took := since(begin)
	if _, err := s.on("node1", fairlead, "run", "-d", "--name", "asker", "-l", "app=asker", "--", "sleep", "infinity"); err != nil {
		return err
	}
	nodes, err := s.kubectl("get", "pods", "-l", "app=MyApp", "-o", "jsonpath={.items[*].spec.nodeName}")
	if err != nil {
		return err
	}
	// Ready Pods are in the nodes' tables a moment later.
	for _, node := range []string{"node1", "node2"} {
		if _, err := s.on(node, "curl", "-sS", "--retry", "30", "--retry-connrefused", "--retry-delay", "1", "--max-time", "60",
			"-o", "/dev/null", "http://"+s.clusterAddr+"/"); err != nil {
			return fmt.Errorf("through the ClusterIP from %s: %w", node, err)
		}
	}
	line(fmt.Sprintf("%d backends ready", replicas), "after %s, on %s", took, strings.Join(strings.Fields(nodes), ", "))
	return nil
}

// ask makes n requests to url from a Pod, with curl and a connection each, and
// returns how many each backend answered.
func (s *stage) ask(url string, n int) (map[string]int, error) {
	asker, err := s.kubectl("get", "pods", "-l", "app=asker", "-o", "jsonpath={.items[0].metadata.name}")
	if err != nil {
		return nil, err
	}
	out, err := s.kubectl("exec", asker, "--", "sh", "-c", loop(url, n))
	return count(out), err
}

// loop is a shell script of n requests, each on its own connection; it
// fails with the first that fails. One curl sends them all: a slow machine starts few programs a second.
func loop(url string, n int) string {
	return fmt.Sprintf("curl -sS --fail-early --max-time 10 -H 'Connection: close' '%s?[1-%d]'", url, n)
}

// count adds up the answers by the name in them.
func count(out string) map[string]int {
	spread := map[string]int{}
	for l := range strings.Lines(out) {
		if name, _, ok := strings.Cut(l, " "); ok {
			spread[name]++
		}
	}
	return spread
}

// even checks that all backends answered, about as often, and n in all.
func even(spread map[string]int, n, backends int) error {
	total := 0
	for name, hits := range spread {
		total += hits
		if n == requests && backends == replicas && (hits < leastShare || hits > mostShare) {
			return fmt.Errorf("%s answered %d of %d requests, which is no even spread: %v", name, hits, n, spread)
		}
	}
	if total != n || len(spread) != backends {
		return fmt.Errorf("%d answers from %d backends, want %d from %d: %v", total, len(spread), n, backends, spread)
	}
	return nil
}

func shares(spread map[string]int) string {
	var hits []int
	for _, n := range spread {
		hits = append(hits, n)
	}
	slices.Sort(hits)
	return strings.Trim(strings.Join(strings.Fields(fmt.Sprint(hits)), " + "), "[]")
}

// clusterIP asks through the virtual IP, from a Pod and from the node itself.
func (s *stage) clusterIP() error {
	begin := time.Now()
	spread, err := s.ask("http://"+s.clusterAddr+"/", requests)
	if err == nil {
		err = even(spread, requests, replicas)
	}
	if err != nil {
		return fmt.Errorf("through the ClusterIP from a Pod: %w", err)
	}
	line("ClusterIP from a Pod", "%d requests in %s, backends answered %s", requests, since(begin), shares(spread))
	out, err := s.on("node2", "sh", "-c", loop("http://"+s.clusterAddr+"/", requests))
	if err == nil {
		err = even(count(out), requests, replicas)
	}
	if err != nil {
		return fmt.Errorf("through the ClusterIP from node2: %w", err)
	}
	line("ClusterIP from node2 itself", "%d requests, backends answered %s", requests, shares(count(out)))
	return nil
}

// names asks through the short and the full DNS name.
func (s *stage) names() error {
	for _, name := range []string{"my-service", "my-service.default.svc.cluster.local"} {
		spread, err := s.ask("http://"+name+"/", 60)
		if err == nil {
			err = even(spread, 60, replicas)
		}
		if err != nil {
			return fmt.Errorf("through the name %s: %w", name, err)
		}
		line(name, "60 requests, backends answered %s", shares(spread))
	}
	return nil
}

// nodePort makes the Service a NodePort and asks from the outside client.
func (s *stage) nodePort() error {
	if _, err := s.kubectl("patch", "svc", "my-service", "-p", `{"spec":{"type":"NodePort"}}`); err != nil {
		return err
	}
	var err error
	if s.port, err = s.kubectl("get", "svc", "my-service", "-o", "jsonpath={.spec.ports[0].nodePort}"); err != nil {
		return err
	}
	for _, node := range []string{"node1", "node2"} {
		url := "http://" + hosts[node] + ":" + s.port + "/"
		var spread map[string]int
		err := s.until("the node port on "+node, 20*time.Second, func() error {
			out, err := s.on("client", "sh", "-c", loop(url, requests))
			if err != nil {
				return err
			}
			spread = count(out)
			return nil
		})
		if err == nil {
			err = even(spread, requests, replicas)
		}
		if err != nil {
			return fmt.Errorf("through %s from the outside client: %w", url, err)
		}
		line("NodePort "+hosts[node]+":"+s.port+" from outside", "%d requests, backends answered %s", requests, shares(spread))
	}
	return nil
}

// watching asks through the ClusterIP on node1 while do is done, and returns what
// the observer saw after it: how long until the last trace of what it looks for,
// and how many requests failed. What it looks for is an answer of the backend
// called name, or a failed request if name is empty.
func (s *stage) watching(name string, do func() error) (last time.Duration, failed int, err error) {
	self, err := os.Executable()
	if err != nil {
		return 0, 0, err
	}
	cmd := exec.CommandContext(s.ctx, "ip", "netns", "exec", "node1", self, "observe", "http://"+s.clusterAddr+"/", name)
	cmd.Stderr = os.Stderr
	pipe, err := cmd.StdoutPipe()
	if err != nil {
		return 0, 0, err
	}
	if err := cmd.Start(); err != nil {
		return 0, 0, err
	}
	if _, err := io.ReadFull(pipe, make([]byte, 1)); err != nil { // it has begun to ask
		return 0, 0, errors.Join(err, cmd.Wait())
	}
	begin := time.Now()
	if err := do(); err != nil {
		return 0, 0, errors.Join(err, cmd.Process.Kill(), cmd.Wait())
	}
	text, _ := io.ReadAll(pipe)
	if err := cmd.Wait(); err != nil {
		return 0, 0, fmt.Errorf("the observer did not come to an end: %w", err)
	}
	var at int64
	if _, err := fmt.Sscan(string(text), &at, &failed); err != nil {
		return 0, 0, err
	}
	return max(0, time.UnixMicro(at).Sub(begin)), failed, nil
}

// quiet is how long what the observer looks for must not be seen before it is
// over; probes come every second.
const quiet = 1500 * time.Millisecond

// observe asks url again and again, writes a dot when it has begun and, once what
// it looks for has not been seen for a while, when that was last (Unix time in
// microseconds) and how many requests failed.
func observe(args []string) int {
	url, name := args[0], args[1]
	client := &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	last, failed := time.Now(), 0
	begun := false
	for deadline := time.Now().Add(40 * time.Second); time.Now().Before(deadline); {
		answer, err := client.Get(url)
		seen := err != nil
		if err != nil {
			failed++
		} else {
			body, _ := io.ReadAll(answer.Body)
			answer.Body.Close()
			seen = name != "" && strings.HasPrefix(string(body), name+" ")
		}
		if seen {
			last = time.Now()
		}
		if !begun && (seen || name == "") {
			begun = true
			fmt.Print(".")
		}
		if begun && time.Since(last) > quiet {
			fmt.Println(last.UnixMicro(), failed)
			return 0
		}
	}
	return 1
}

// post sends a POST to a Pod, from its node's network.
func (s *stage) post(pod, path string) error {
	ip, err := s.podIP(pod)
	if err != nil {
		return err
	}
	_, err = s.on("node1", "curl", "-s", "--max-time", "2", "-X", "POST", "http://"+ip+":9376"+path)
	return err
}

// unready makes one backend fail its readiness probe: it leaves, without a
// failed request, and comes back.
func (s *stage) unready() error {
	pods, err := s.podNames()
	if err != nil {
		return err
	}
	took, failed, err := s.watching(pods[0], func() error { return s.post(pods[0], "/unready") })
	if err != nil {
		return fmt.Errorf("%s was made unready: %w", pods[0], err)
	}
	if failed > 0 {
		return fmt.Errorf("%d requests failed while one backend became unready", failed)
	}
	line("one backend unready (probed every second)", "left after %s, no request failed", took.Round(time.Millisecond))
	if err := s.post(pods[0], "/ready"); err != nil {
		return err
	}
	return s.until(pods[0]+" to be ready again", 30*time.Second, func() error {
		spread, err := s.ask("http://"+s.clusterAddr+"/", 60)
		if err != nil {
			return err
		}
		return even(spread, 60, replicas)
	})
}

// mostFailing bounds how long requests may meet a dead backend: a hundred times
// what it takes on an idle machine.
const mostFailing = 3 * time.Second

// killed ends one backend by SIGKILL: it leaves at once, and is started again.
func (s *stage) killed() error {
	pods, err := s.podNames()
	if err != nil {
		return err
	}
	took, failed, err := s.watching("", func() error {
		_ = s.post(pods[1], "/die") // dies before it answers
		return nil
	})
	if err != nil {
		return fmt.Errorf("%s was killed: %w", pods[1], err)
	}
	line("one backend killed", "%d requests failed, the last after %s", failed, took.Round(time.Millisecond))
	if took > mostFailing {
		return fmt.Errorf("requests failed for %s after one backend was killed", took)
	}
	if err := s.until("the killed backend to be started again", 60*time.Second, func() error {
		out, err := s.kubectl("get", "pod", pods[1], "-o",
			`jsonpath={.status.containerStatuses[0].restartCount} {.status.conditions[?(@.type=="Ready")].status}`)
		if err == nil && out != "1 True" {
			err = fmt.Errorf("restarts and readiness are %q", out)
		}
		return err
	}); err != nil {
		return err
	}
	line("the killed backend", "has been started again")
	return nil
}

// errAnswered is the wrong end of a question that should be refused.
var errAnswered = errors.New("want curl's exit code 7")

// allGone deletes all backends: a connection is refused at once.
func (s *stage) allGone() error {
	if _, err := s.kubectl("delete", "pods", "-l", "app=MyApp"); err != nil {
		return err
	}
	for host, to := range map[string]string{"node1": s.clusterAddr + ":80", "client": hosts["node2"] + ":" + s.port} {
		var seconds string
		// The nodes learn of the last Pod's end a moment after kubectl does.
		err := s.until(to+" to refuse", 10*time.Second, func() error {
			var err error
			seconds, err = s.on(host, "curl", "-s", "-w", "%{time_total}", "--max-time", "2", "http://"+to+"/")
			var exit *exec.ExitError
			const refused = 7 // curl: failed to connect
			if !errors.As(err, &exit) || exit.ExitCode() != refused {
				return fmt.Errorf("all backends are gone, but %s from %s is not refused: %w", to, host, errors.Join(err, errAnswered))
			}
			return nil
		})
		if err != nil {
			return err
		}
		line("no backend left: "+to+" from "+host, "refused after %s s", seconds)
	}
	return nil
}
