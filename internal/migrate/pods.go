package migrate

import (
	"fmt"
	"hash/fnv"
	"slices"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// PodLabel is the label of the Pods that check or clean up a node.
const PodLabel = "fairlead.dev/migrate"

// podDeadline bounds such a Pod, in seconds.
const podDeadline = 300

// CheckWithin bounds how long the Pod of a Check looks for the wanted rules, in seconds.
const CheckWithin = 60

// drainWithin bounds how long the Pod of a Drain waits for connections to end, in seconds: it is for short ones.
const drainWithin = 5

// StillOpen is the exit code of the Pod of a Drain if connections are left (EX_TEMPFAIL of sysexits.h).
const StillOpen = 75

// PodFor returns the Pod that takes a step Check, CleanUp, Drain or Undrain on a node: a copy of a proxy's Pod, which runs once. Those of
// fairlead need no program of the node; kube-proxy's rules are removed by kube-proxy, whose image has iptables.
func PodFor(step Step, node string, theirs, ours *appsv1.DaemonSet, s *Settings) *corev1.Pod {
	from, verb, args := ours, "check", []string(nil)
	switch {
	case step.Action == Check:
		args = []string{
			"migrate", "check-node", "--node=" + node, "--program=" + string(step.Program), fmt.Sprintf("--within=%ds", CheckWithin),
		}
		if step.Program == KubeProxy {
			args = append(args, "--mode="+s.Mode)
		}
		if step.Only {
			args = append(args, "--healthz="+s.Healthz.String(), "--metrics="+s.Metrics.String())
		}
		if step.Takes {
			args = append(args, "--take-clients")
		}
	case step.Action == Drain:
		verb, args = "drain", []string{"migrate", "drain-node", fmt.Sprintf("--within=%ds", drainWithin)}
	case step.Action == Undrain:
		verb, args = "undrain", []string{"migrate", "drain-node", "--undo"}
	case step.Program == KubeProxy:
		from, verb = theirs, "cleanup"
	default:
		verb, args = "cleanup", []string{"proxy", "--cleanup"}
	}
	pod := Once(from, verb, string(step.Program), node)
	c := &pod.Spec.Containers[0]
	if from == theirs {
		c.Args = append(slices.Clone(c.Args), "--cleanup")
	} else {
		c.Args = args
	}
	return pod
}

// Once returns a copy of a DaemonSet's Pod that runs once on a node, with its first container. The verb and of, what it is about, are
// in its name.
func Once(from *appsv1.DaemonSet, verb, of, node string) *corev1.Pod {
	h := fnv.New64a()
	_, _ = fmt.Fprint(h, node, of)
	template := from.Spec.Template.DeepCopy()
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name: fmt.Sprintf("fairlead-migrate-%s-%x", verb, h.Sum64()), Namespace: from.Namespace,
			Labels: map[string]string{PodLabel: verb},
		},
		Spec: template.Spec,
	}
	deadline := int64(podDeadline)
	pod.Spec.NodeName, pod.Spec.Affinity, pod.Spec.NodeSelector = node, nil, nil
	pod.Spec.RestartPolicy, pod.Spec.ActiveDeadlineSeconds = corev1.RestartPolicyNever, &deadline
	pod.Spec.Containers = pod.Spec.Containers[:1]
	c := &pod.Spec.Containers[0]
	c.StartupProbe, c.LivenessProbe, c.ReadinessProbe, c.Lifecycle, c.Ports = nil, nil, nil, nil, nil
	c.TerminationMessagePolicy = corev1.TerminationMessageFallbackToLogsOnError
	return pod
}
