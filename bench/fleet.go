package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

const (
	// fleetServices is how many Services, of sliceSize endpoints each, a node reads
	// when it connects.
	fleetServices = 10
	// fleetPace is the time from one change to the next.
	fleetPace = time.Second
	// fleetRest is how long after the last event the work for a change is over: the
	// server still counts what it has sent.
	fleetRest = 50 * time.Millisecond
	// fleetLimit bounds the connecting of all nodes, and one change.
	fleetLimit = 5 * time.Minute
)

// fleetFigures are what one server needs for so many nodes.
type fleetFigures struct {
	connect    time.Duration // until all that connect at once have what there is
	connectCPU time.Duration
	memory     float64 // bytes of the server for one node
	half, last float64 // milliseconds from a change to the median and to the last node
	cpu        float64 // microseconds of the server for a change and node
	watching   float64 // microseconds of the process with the watches for that
	sent       float64 // bytes of a change to one node
}

// runFleet holds the watches of many nodes on fairlead and on kube-apiserver, and
// changes an EndpointSlice once a second. Both start afresh for each number of nodes,
// so that memory of the ones before is not counted.
func (b *bench) runFleet(ctx context.Context) ([]figure, error) {
	var figures []figure
	counts := b.nodes
	if counts == nil {
		counts = []int{b.few(1000, 25), b.few(5000, 50), b.few(10_000, 100)}
	}
	for _, nodes := range counts {
		mine, peer, err := b.fleets(ctx, nodes)
		if err != nil {
			return figures, fmt.Errorf("%d nodes: %w", nodes, err)
		}
		var half, last, cpu expectation
		if nodes == 5000 {
			half, last, cpu = expectation{share: 0.8}, expectation{below: 120}, expectation{below: 30}
		}
		if nodes == 5000 && b.shared == 2 { // a write, a TLS record and a connection's goroutines for each node
			half, last, cpu = expectation{share: 1}, expectation{share: 1}, expectation{share: 1}
		}
		add := func(what string, u unit, a, z float64, want expectation) {
			figures = append(figures, figure{what: fmt.Sprintf("%d nodes: %s", nodes, what), unit: u, fairlead: a, peer: z,
				peerName: "kube-apiserver", want: want})
		}
		add("from a change to the median node", milliseconds, mine.half, peer.half, half)
		add("from a change to the last node", milliseconds, mine.last, peer.last, last)
		add("CPU of the server for a change and node", microseconds, mine.cpu, peer.cpu, cpu)
		add("CPU of all nodes for a change, each", microseconds, mine.watching, peer.watching, expectation{})
		add("bytes for a change and node", kilobytes, mine.sent, peer.sent, expectation{})
		add("memory of the server for a node", kilobytes, mine.memory, peer.memory, expectation{})
		add("all connect at once, until the last has the lists", seconds, mine.connect.Seconds(), peer.connect.Seconds(), expectation{})
		add("CPU of the server for that", seconds, mine.connectCPU.Seconds(), peer.connectCPU.Seconds(), expectation{})
	}
	return figures, nil
}

// parseNodes reads numbers of nodes.
func parseNodes(s string) ([]int, error) {
	var counts []int
	for field := range strings.SplitSeq(s, ",") {
		n, err := strconv.Atoi(field)
		if err != nil || n < 1 {
			return nil, fmt.Errorf("%q is no number of nodes", field)
		}
		counts = append(counts, n)
	}
	return counts, nil
}

// fleets measures both servers, one after the other.
func (b *bench) fleets(ctx context.Context, nodes int) (mine, peer fleetFigures, err error) {
	dir, err := os.MkdirTemp(b.dir, "fleet-")
	if err != nil {
		return mine, peer, err
	}
	kubernetes, err := startKubernetes(ctx, dir, b.peers, "--service-cluster-ip-range", createRanges, "--etcd-prefix", "/kubernetes")
	if err != nil {
		return mine, peer, err
	}
	defer func() { err = errors.Join(err, kubernetes.stop()) }()
	server, err := b.startServer(ctx, dir, kubernetes.store)
	if err != nil {
		return mine, peer, err
	}
	defer func() { err = errors.Join(err, server.server.stop()) }()
	if mine, err = b.fleet(ctx, server, filepath.Join(dir, "data", "admin.kubeconfig"), nodes); err != nil {
		return mine, peer, fmt.Errorf("fairlead: %w", err)
	}
	say := func(name string, f fleetFigures) {
		b.say("%d nodes on %s: a change is at the median node after %.0f ms, at the last after %.0f ms, for %.1f µs a node; connected after %s",
			nodes, name, f.half, f.last, f.cpu, f.connect.Round(10*time.Millisecond))
	}
	say("fairlead", mine)
	peer, err = b.fleet(ctx, &creator{server: kubernetes.server, config: kubernetes.config}, kubernetes.kubeconfig, nodes)
	if err != nil {
		return mine, peer, fmt.Errorf("kube-apiserver: %w", err)
	}
	say("kube-apiserver", peer)
	return mine, peer, nil
}

// fleet measures one server.
func (b *bench) fleet(ctx context.Context, c *creator, kubeconfig string, nodes int) (f fleetFigures, err error) {
	client, err := c.client()
	if err != nil {
		return f, err
	}
	if err := makeNamespace(ctx, client); err != nil {
		return f, err
	}
	made, err := fill(ctx, client, shape{prefix: "fleet", services: fleetServices, endpoints: sliceSize})
	if err != nil {
		return f, err
	}
	if err := c.server.settle(time.Minute); err != nil {
		return f, err
	}
	empty, err := c.server.memory()
	if err != nil {
		return f, err
	}
	before, err := c.server.cpu()
	if err != nil {
		return f, err
	}
	watchers, err := b.startFleet(ctx, kubeconfig, nodes)
	if err != nil {
		return f, err
	}
	defer func() { err = errors.Join(err, watchers.stop()) }()
	connected, err := watchers.next()
	if err != nil {
		return f, err
	}
	f.connect = connected.Last.Sub(connected.Begin)
	after, err := c.server.cpu()
	if err != nil {
		return f, err
	}
	f.connectCPU = after - before
	if err := c.server.settle(time.Minute); err != nil {
		return f, err
	}
	full, err := c.server.memory()
	if err != nil {
		return f, err
	}
	f.memory = (full - empty) / float64(nodes)
	return f, b.changeFleet(ctx, c.server, client, watchers, endpointSlice(made[0].name, 0, nil).Name, nodes, &f)
}

// changeFleet changes the slice, and fills in what that takes.
func (b *bench) changeFleet(
	ctx context.Context, server *process, client kubernetes.Interface, watchers *fleet, name string, nodes int, f *fleetFigures,
) error {
	slices := client.DiscoveryV1().EndpointSlices(benchNamespace)
	slice, err := slices.Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	changes := b.few(15, 3)
	var half, last []float64
	var cpu, watching time.Duration
	var sent int64
	for range changes {
		time.Sleep(fleetPace)
		before, watchingBefore, err := bothCPU(server, watchers.process())
		if err != nil {
			return err
		}
		flipReady(slice)
		begin := time.Now()
		if slice, err = slices.Update(ctx, slice, metav1.UpdateOptions{}); err != nil {
			return err
		}
		seen, err := watchers.next()
		if err != nil {
			return err
		}
		half = append(half, milliseconds.in(seen.Median.Sub(begin)))
		last = append(last, milliseconds.in(seen.Last.Sub(begin)))
		sent += seen.Bytes
		time.Sleep(fleetRest)
		after, watchingAfter, err := bothCPU(server, watchers.process())
		if err != nil {
			return err
		}
		cpu += after - before
		watching += watchingAfter - watchingBefore
	}
	f.half, f.last = percentile(half, 0.5), percentile(last, 0.5)
	f.cpu = microseconds.in(cpu) / float64(changes*nodes)
	f.watching = microseconds.in(watching) / float64(changes*nodes)
	f.sent = float64(sent) / float64(changes*nodes)
	return nil
}

// bothCPU is what two processes have used.
func bothCPU(a, b *process) (x, y time.Duration, err error) {
	x, errA := a.cpu()
	y, errB := b.cpu()
	return x, y, errors.Join(errA, errB)
}

// flipReady changes whether the first endpoint is ready.
func flipReady(s *discoveryv1.EndpointSlice) {
	ready := !*s.Endpoints[0].Conditions.Ready
	s.Endpoints[0].Conditions.Ready = &ready
}

// fleet is a process with the watches of many nodes.
type fleet struct {
	cmd     *exec.Cmd
	reports chan fleetReport
	stdin   io.Closer // its end ends the process
}

// startFleet starts the process, which connects at once.
func (b *bench) startFleet(ctx context.Context, kubeconfig string, nodes int) (*fleet, error) {
	cmd := exec.CommandContext(ctx, b.self, watchCommand, kubeconfig, fmt.Sprint(nodes), fmt.Sprint(b.shared))
	f := &fleet{cmd: cmd, reports: make(chan fleetReport, 1)}
	f.cmd.Stderr = os.Stderr
	stdin, err := f.cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	f.stdin = stdin
	stdout, err := f.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := f.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start the nodes: %w", err)
	}
	go func() {
		defer close(f.reports)
		for lines := json.NewDecoder(bufio.NewReader(stdout)); ; {
			var r fleetReport
			if lines.Decode(&r) != nil {
				return
			}
			f.reports <- r
		}
	}()
	return f, nil
}

// process is the process, to be asked for what it uses.
func (f *fleet) process() *process { return &process{name: "watches", cmd: f.cmd} }

// next waits until all nodes have what they wait for.
func (f *fleet) next() (fleetReport, error) {
	select {
	case r, ok := <-f.reports:
		if !ok {
			return r, errors.New("the process with the nodes has ended")
		}
		return r, nil
	case <-time.After(fleetLimit):
		return fleetReport{}, fmt.Errorf("not every node had the change within %s", fleetLimit)
	}
}

// stop ends the process.
func (f *fleet) stop() error {
	err := f.stdin.Close()
	for range f.reports { // read to the end, as Wait asks for
	}
	return errors.Join(err, f.cmd.Wait())
}
