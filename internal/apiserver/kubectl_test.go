package apiserver_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
)

// kubectl finds the program: $FAIRLEAD_KUBECTL, else the one in PATH.
func kubectl(t *testing.T) string {
	t.Helper()
	if p := os.Getenv("FAIRLEAD_KUBECTL"); p != "" {
		return p
	}
	p, err := exec.LookPath("kubectl")
	if err != nil {
		t.Skip("no kubectl in PATH and none named by FAIRLEAD_KUBECTL")
	}
	return p
}

// manifest is the manifest of the documents, with a Pod (behaviour 15).
const manifest = `apiVersion: v1
kind: Service
metadata:
  name: my-service
spec:
  selector:
    app: MyApp
  ports:
    - protocol: TCP
      port: 80
      targetPort: 9376
---
apiVersion: v1
kind: Pod
metadata:
  name: backend
  labels:
    app: MyApp
spec:
  containers:
    - name: app
      image: host
      command: [sleep, "1"]
`

func TestKubectl(t *testing.T) {
	t.Parallel()
	program := kubectl(t)
	s := apiservertest.StartServer(t)
	home := t.TempDir()
	files := map[string]string{
		"good.yaml":  manifest,
		"bad.yaml":   strings.Replace(manifest, "image: host", "image: host\n      imagePullPolicy: Perhaps", 1),
		"other.yaml": strings.Replace(manifest, "9376", "9999", 1),
		"typo.yaml":  strings.Replace(manifest, "selector:", "selectr:", 1),
	}
	for name, text := range files {
		write(t, home, name, text)
	}
	k := kubectlOf{t, program, s.Kubeconfig(), home}
	k.steps([]kubectlStep{
		{"apply -f good.yaml", []string{"service/my-service created", "pod/backend created"}},
		{"apply -f good.yaml", []string{"service/my-service unchanged", "pod/backend unchanged"}},
		{"get svc my-service", []string{"NAME", "CLUSTER-IP", "EXTERNAL-IP", "PORT(S)", "10.96.", "80/TCP"}},
		{"get po,svc -o wide", []string{"NOMINATED NODE", "pod/backend", "0/1", "Pending", "app=MyApp"}},
		{"get all", []string{"pod/backend", "service/kubernetes"}},
		{"get ep,no,ns,events,cm,sa,secrets,endpointslices,leases,ip,servicecidrs -A",
			[]string{"namespace/kube-node-lease", "servicecidr.networking.k8s.io/kubernetes"}},
		{"debug backend --image=host --attach=false", []string{"!", "spec.ephemeralContainers: Forbidden: containers cannot be added to a Pod"}},
		{"describe svc my-service", []string{"TargetPort:", "9376/TCP", "app=MyApp"}},
		{"explain service.spec.externalTrafficPolicy", []string{"externalTrafficPolicy", "Local"}},
		{"explain pod.spec.containers.readinessProbe", []string{"httpGet"}},
		{"apply -f typo.yaml", []string{"!", `unknown field "spec.selectr"`}},
		{"apply -f bad.yaml --dry-run=server", []string{"!", "imagePullPolicy"}},
		{"create -f bad.yaml --validate=false", []string{"!", `spec.containers[0].imagePullPolicy: Unsupported value: "Perhaps"`}},
		{"apply --server-side -f other.yaml --field-manager=other", []string{"!", "conflict", "targetPort"}},
		{"apply --server-side -f good.yaml --field-manager=other --force-conflicts", []string{"serverside-applied"}},
		{"diff -f good.yaml", nil},
		{"label po backend tier=one", []string{"pod/backend labeled"}},
		{"get po -l tier=one -o name", []string{"pod/backend"}},
		{`patch svc my-service -p {"spec":{"ports":[{"port":80,"targetPort":9377}]}}`, []string{"service/my-service patched"}},
		{"get svc my-service -o jsonpath={.spec.ports[0].targetPort}", []string{"9377"}},
		{"create ns team", []string{"namespace/team created"}},
		{"create -n team secret generic s --from-literal=a=b", []string{"secret/s created"}},
		{"get --raw /readyz", []string{"ok"}},
		{"get --raw /version", []string{`"gitVersion": "v1.37.0+fairlead"`}},
		{"cluster-info", []string{s.URL()}},
		{"delete -f good.yaml", []string{`service "my-service" deleted`, `pod "backend" deleted`}},
		{"get svc my-service", []string{"!", `services "my-service" not found`}},
	})
}

// kubectlOf is kubectl with a kubeconfig and a home.
type kubectlOf struct {
	*testing.T
	program, kubeconfig, home string
}

type kubectlStep struct {
	args string
	want []string // in the output; a leading "!" wants a failure
}

func (k kubectlOf) command(args string) *exec.Cmd {
	list := append([]string{"--kubeconfig", k.kubeconfig, "--cache-dir", filepath.Join(k.home, "cache")}, strings.Split(args, " ")...)
	cmd := exec.CommandContext(k.Context(), k.program, list...)
	cmd.Dir, cmd.Env = k.home, append(os.Environ(), "HOME="+k.home)
	return cmd
}

func (k kubectlOf) steps(steps []kubectlStep) {
	k.Helper()
	for _, step := range steps {
		raw, err := k.command(step.args).CombinedOutput()
		out := string(raw)
		wantFailure := len(step.want) > 0 && step.want[0] == "!"
		if (err != nil) != wantFailure {
			k.Errorf("kubectl %s: %v\n%s", step.args, err, out)
			continue
		}
		for _, w := range step.want {
			if w != "!" && !strings.Contains(out, w) {
				k.Errorf("kubectl %s: no %q in\n%s", step.args, w, out)
			}
		}
		if strings.Contains(out, "Warning: short name") {
			k.Errorf("kubectl %s: %s", step.args, out)
		}
	}
}
