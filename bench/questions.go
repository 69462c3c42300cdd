package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// askings is how often each question is asked.
const askings = 5

// mostAnswer is how many milliseconds an answer may take.
const mostAnswer = 2000

// anotherType is the file of a plan: a Service of the world that gets a node port.
const anotherType = `apiVersion: v1
kind: Service
metadata: {name: svc-1, namespace: ` + benchNamespace + `}
spec: {type: NodePort}
`

// runQuestions measures what an operator's questions cost beside 10,000 Services: the whole command, from its start to its answer.
func (b *bench) runQuestions(ctx context.Context) (figures []figure, err error) {
	size := planeSize{services: b.few(10_000, 60), endpoints: b.few(5, 2), limit: b.limit()}
	err = b.inWorld(ctx, size, func(w *world) (err error) {
		h, err := b.net.host(ctx, fmt.Sprintf("node%d", b.net.count))
		if err != nil {
			return err
		}
		var proc *process
		defer func() { err = errors.Join(err, h.end(ctx, proc)) }()
		if err := makeNode(ctx, w.client, h); err != nil {
			return err
		}
		dir, err := os.MkdirTemp(b.dir, "questions-")
		if err != nil {
			return err
		}
		if proc, err = b.fairleadProxy().start(h, dir, w.kubeconfig); err != nil {
			return err
		}
		if err := w.measureLoad(ctx, h, proc, &planeResult{}); err != nil {
			return errors.Join(err, proc.alive())
		}
		file := filepath.Join(dir, "service.yaml")
		if err := os.WriteFile(file, []byte(anotherType), 0o600); err != nil {
			return err
		}
		for _, q := range []struct {
			args []string
			says string
		}{
			{[]string{"plan", "-f", file}, "is added, sent to"},
			{[]string{"explain", "svc-1", "-n", benchNamespace}, "svc-1"},
			{[]string{"status"}, "bench"},
		} {
			took, cpu, err := b.question(ctx, h, w, q.says, q.args...)
			if err != nil {
				return fmt.Errorf("%s: %w", q.args[0], err)
			}
			what := fmt.Sprintf("fairlead %s at %s, ", q.args[0], size)
			figures = append(figures, unpaired(what+"p50", milliseconds, percentile(took, 0.5), expectation{below: mostAnswer}),
				unpaired(what+"its CPU", milliseconds, percentile(cpu, 0.5), expectation{}))
		}
		return nil
	})
	return figures, err
}

// question runs a command of fairlead on a host some times, whose answer has to say something, and returns the milliseconds that each
// took, and its CPU.
func (b *bench) question(ctx context.Context, h *host, w *world, says string, args ...string) (took, cpu []float64, err error) {
	for range askings {
		var out bytes.Buffer
		cmd := exec.CommandContext(ctx, b.fairlead, append(args, "--kubeconfig", w.kubeconfig)...)
		cmd.Stdout, cmd.Stderr = &out, &out
		begin := time.Now()
		if err := h.on(cmd.Run); err != nil {
			return nil, nil, fmt.Errorf("%w: %s", err, &out)
		}
		if !strings.Contains(out.String(), says) {
			return nil, nil, fmt.Errorf("the answer does not say %q: %s", says, &out)
		}
		took = append(took, milliseconds.in(time.Since(begin)))
		cpu = append(cpu, milliseconds.in(cmd.ProcessState.UserTime()+cmd.ProcessState.SystemTime()))
	}
	return took, cpu, nil
}
