package pods

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/kernel/fileio"
	"github.com/fairlead/fairlead/internal/kernel/mount"
	"github.com/fairlead/fairlead/internal/podspec"
	"github.com/fairlead/fairlead/internal/svc"
)

const (
	// enforceLabel of a namespace is the level that Pod Security enforces for its Pods.
	enforceLabel    = "pod-security.kubernetes.io/enforce"
	levelPrivileged = "privileged"
)

// reveal makes a Pod find its program and its working directory where it does not see the directories of the machine's users.
// It changes nothing that such a Pod sees. client is nil for a dry run.
func (r *runCommand) reveal(ctx context.Context, client kubernetes.Interface, namespace string, pod *corev1.Pod) error {
	c := &pod.Spec.Containers[0]
	program := c.Command[0]
	if strings.Contains(program, "/") && !filepath.IsAbs(program) {
		program = filepath.Join(c.WorkingDir, program)
	}
	hidden, away := filepath.IsAbs(program) && mount.Hidden(program), mount.Hidden(c.WorkingDir)
	if !hidden && !away {
		return nil
	}
	confined, err := r.confined(ctx, client, namespace, pod)
	if err != nil || !confined {
		return err
	}
	if away && r.workDirGiven {
		return fmt.Errorf("--workdir: %s is hidden from Pods that are not privileged; choose another directory, such as / or /tmp", c.WorkingDir)
	}
	if hidden {
		if err := show(pod, program); err != nil {
			return err
		}
		c.Command[0] = program
	}
	if away {
		fmt.Fprintf(r.Err, "the working directory is /: the Pods do not see %s; --workdir chooses another\n", c.WorkingDir)
		c.WorkingDir = "/"
	}
	for _, a := range c.Command[1:] {
		if st, err := os.Stat(a); err == nil && st.Mode().IsRegular() && filepath.IsAbs(a) && mount.Hidden(a) {
			fmt.Fprintf(r.Err, "warning: the Pods do not see %s: files below /home, /root and /tmp are hidden from them\n", a)
		}
	}
	return nil
}

// show has the Pod name the program by its content: nodes show it to whoever knows that.
func show(pod *corev1.Pod, program string) error {
	program = filepath.Clean(program)
	sum, err := fileio.HashExecutable(program, fileio.MaxExecutable)
	if err != nil {
		return fmt.Errorf("command %s is hidden from Pods that are not privileged, and cannot be shown to them: %w; run this command where "+
			"the program is, or install the program in a directory that they see, such as /usr/local/bin or /opt, on each node", program, err)
	}
	pod.Annotations = map[string]string{svc.ProgramsAnnotation: podspec.Program{Path: program, SHA256: sum}.Line()}
	return nil
}

// confined reports whether the Pods are not privileged. Where it cannot be known, they are not.
func (r *runCommand) confined(ctx context.Context, client kubernetes.Interface, namespace string, pod *corev1.Pod) (bool, error) {
	switch {
	case client == nil:
		return true, nil
	case r.asSet: // a controller creates its Pods: only the namespace's label makes them privileged
		ns, err := client.CoreV1().Namespaces().Get(ctx, namespace, metav1.GetOptions{})
		return err != nil || ns.Labels[enforceLabel] != levelPrivileged, nil //nolint:nilerr // the user need not be able to read it
	}
	made, err := client.CoreV1().Pods(namespace).Create(ctx, pod, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
	if err != nil {
		return false, err
	}
	return made.Annotations[svc.PodSecurityAnnotation] != levelPrivileged, nil
}
