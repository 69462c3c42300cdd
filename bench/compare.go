package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
)

// corpusProgram is the compiled test of test/api.
const corpusProgram = "api.test"

// compared is the last line of the comparison.
var compared = regexp.MustCompile(`(\d+) requests, (\d+) differences with a reason, (\d+) without`)

// runAPI sends every request of test/api to fairlead and to a kube-apiserver
// and prints in what the answers differ.
func (b *bench) runAPI(ctx context.Context) (_ []figure, err error) {
	dir, err := os.MkdirTemp(b.dir, "compare-")
	if err != nil {
		return nil, err
	}
	// Admission that fairlead does not have is off as well.
	k, err := startKubernetes(ctx, dir, b.peers, "--allow-privileged",
		"--disable-admission-plugins", "TaintNodesByCondition,DefaultTolerationSeconds,Priority")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, k.stop()) }()
	var out bytes.Buffer
	cmd := exec.CommandContext(ctx, b.peer(corpusProgram), "-test.v", "-test.run", "^TestCompare$", "-kubeconfig", k.kubeconfig)
	cmd.Dir, cmd.Stdout, cmd.Stderr = b.corpus, &out, &out
	failed := cmd.Run()
	m := compared.FindStringSubmatch(out.String())
	if m == nil {
		return nil, fmt.Errorf("the comparison ended early: %w\n%s", failed, out.String())
	}
	for line := range strings.Lines(out.String()) {
		if strings.Contains(line, ".txt:") {
			fmt.Print(strings.TrimLeft(line, " "))
		}
	}
	fmt.Println()
	var n [3]float64
	for i := range n {
		if n[i], err = strconv.ParseFloat(m[i+1], 64); err != nil {
			return nil, err
		}
	}
	figures := []figure{
		unpaired("requests whose whole answers were compared with kube-apiserver's", pieces, n[0], expectation{}),
		unpaired("differences with a reason", pieces, n[1], expectation{}),
		unpaired("differences without", pieces, n[2], expectation{below: 1}),
	}
	if failed != nil {
		return figures, fmt.Errorf("%.0f differences without a reason, or reasons without a difference; they are printed above", n[2])
	}
	return figures, nil
}
