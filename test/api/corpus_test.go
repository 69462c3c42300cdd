package api_test

import (
	"context"
	"flag"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/fairlead/fairlead/internal/apiserver"
	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
	"github.com/fairlead/fairlead/test/api"
)

// kubeconfig names another server to send the requests to, for example a real
// kube-apiserver:
//
//	go test ./test/api -args -kubeconfig FILE
var kubeconfig = flag.String("kubeconfig", "", "the server to test; empty starts one")

// started tells the namespaces of one run from those of another.
var started = strconv.FormatInt(time.Now().Unix(), 36)

// minRequests is how many requests the corpus has at least.
const minRequests = 1000

func TestCorpus(t *testing.T) {
	n := runFiles(t, server(t), "testdata/*.txt")
	if f := flag.Lookup("test.run"); n < minRequests && f.Value.String() == "" {
		t.Errorf("only %d requests were made, want at least %d", n, minRequests)
	}
}

func TestStrictLoadBalancers(t *testing.T) {
	if *kubeconfig != "" {
		t.Skip("an option of fairlead")
	}
	runFiles(t, apiservertest.Start(t, func(o *apiserver.Options) { o.StrictLoadBalancers = true }), "testdata/strict/*.txt")
}

// runFiles runs the cases of all files of the pattern and returns how many
// requests there were.
func runFiles(t *testing.T, config *rest.Config, pattern string) int {
	t.Helper()
	runner := newRunner(t, config)
	runner.Other = *kubeconfig != ""
	eachCase(t, pattern, func(t *testing.T, file string, c api.Case) {
		differences, err := runner.Run(context.Background(), c)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range differences {
			t.Errorf("%s:%s", file, d)
		}
	})
	t.Logf("%d requests", runner.Requests)
	return runner.Requests
}

// TestCompare sends every request to fairlead and to the server of -kubeconfig
// and wants no difference without a reason.
func TestCompare(t *testing.T) {
	if *kubeconfig == "" {
		t.Skip("needs -kubeconfig FILE of a kube-apiserver; make -C bench compare brings one")
	}
	fairlead, peer := newRunner(t, apiservertest.Start(t)), newRunner(t, server(t))
	var explained, unexplained int
	eachCase(t, "testdata/*.txt", func(t *testing.T, file string, c api.Case) {
		differences, err := api.Compare(context.Background(), fairlead, peer, c)
		if err != nil {
			t.Errorf("%s:%v", file, err)
		}
		for _, d := range differences {
			if d.Why != "" {
				explained++
				t.Logf("%s:%s", file, d)
				continue
			}
			unexplained++
			t.Errorf("%s:%s", file, d)
		}
	})
	t.Logf("%d requests, %d differences with a reason, %d without", fairlead.Requests, explained, unexplained)
}

// Every reason for a difference is listed in docs/compatibility.md, and no other.
func TestReasonsAreDocumented(t *testing.T) {
	doc, err := os.ReadFile("../../docs/compatibility.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, ok := strings.Cut(string(doc), "\n## The reasons beside the requests\n")
	section, _, _ = strings.Cut(section, "\n## ")
	if !ok {
		t.Fatal("the section of the reasons is missing")
	}
	listed := map[string]bool{}
	for line := range strings.Lines(section) {
		if reason, ok := strings.CutPrefix(strings.TrimSpace(line), "- "); ok {
			listed[reason] = false
		}
	}
	eachCase(t, "testdata/*.txt", func(t *testing.T, file string, c api.Case) {
		for _, s := range c.Steps {
			for _, e := range s.Explained {
				if _, ok := listed[e.Why]; !ok {
					t.Errorf("%s:%d: docs/compatibility.md does not list: %s", file, e.Line, e.Why)
				}
				listed[e.Why] = true
			}
		}
	})
	for reason, used := range listed {
		if !used {
			t.Errorf("docs/compatibility.md lists what no request has: %s", reason)
		}
	}
}

func newRunner(t *testing.T, config *rest.Config) *api.Runner {
	t.Helper()
	config = rest.CopyConfig(config)
	config.QPS = -1
	// A kube-apiserver without controllers never ends a namespace, and may have
	// those of an earlier run.
	runner, err := api.NewRunner(config, "corpus-"+started)
	if err != nil {
		t.Fatal(err)
	}
	return runner
}

// eachCase calls do in its own test for each case of the files.
func eachCase(t *testing.T, pattern string, do func(t *testing.T, file string, c api.Case)) {
	t.Helper()
	files, err := filepath.Glob(pattern)
	if err != nil || len(files) == 0 {
		t.Fatalf("no files %s: %v", pattern, err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		cases, err := api.Parse(filepath.Base(file), string(text))
		if err != nil {
			t.Fatal(err)
		}
		t.Run(filepath.Base(file), func(t *testing.T) {
			for _, c := range cases {
				t.Run(c.Name, func(t *testing.T) { do(t, file, c) })
			}
		})
	}
}

func server(t *testing.T) *rest.Config {
	if *kubeconfig == "" {
		return apiservertest.Start(t)
	}
	c, err := clientcmd.BuildConfigFromFlags("", *kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestParseRefuses(t *testing.T) {
	for name, text := range map[string]string{
		"no case":           "GET services\n200\n",
		"no code":           "case a\nGET services\n",
		"no code, new case": "case a\nGET services\ncase b\nGET services\n200\n",
		"unknown verb":      "case a\nFETCH services\n200\n",
		"no request":        "case a\n  Required spec\n",
		"unknown reason":    "case a\nGET services\n200\n  Wrong spec\n",
		"unknown operator":  "case a\nGET services\n200\n  .spec != 1\n",
	} {
		if _, err := api.Parse(name, text); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}
