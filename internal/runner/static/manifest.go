package static

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	kjson "k8s.io/apimachinery/pkg/runtime/serializer/json"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes/scheme"

	"github.com/fairlead/fairlead/internal/kernel/fileio"
	"github.com/fairlead/fairlead/internal/podspec"
	"github.com/fairlead/fairlead/internal/svc"
)

// Annotations of static pods, kubelet's (pkg/kubelet/types).
const (
	configSource = "kubernetes.io/config.source"
	configHash   = "kubernetes.io/config.hash"
)

const reasonStaticPod = "InvalidStaticPod"

// maxManifest is the size that a file of a static pod may have.
const maxManifest = 1 << 20

// manifest is a file of a static pod as it was read.
type manifest struct {
	text []byte
	pod  *corev1.Pod // of the last text that was right
	err  error       // of text
}

// manifestNames lists the files in dir that are meant to be pods, none if there is no dir.
// Only root may write to it: what it describes runs as root of the machine.
func manifestNames(dir string) ([]string, error) {
	if dir == "" {
		return nil, nil
	}
	return fileio.TrustedFiles(dir, ".yaml", ".yml", ".json")
}

// read reads a file again, whose last state is m. The error is what is wrong with it.
func (m manifest) read(dir, name string, parse func(text []byte, file string) (*corev1.Pod, error)) (manifest, error) {
	text, err := fileio.ReadTrusted(filepath.Join(dir, name), maxManifest)
	if err != nil {
		m.text, m.err = nil, err
		return m, err
	}
	if m.text != nil && bytes.Equal(text, m.text) {
		return m, m.err
	}
	m.text = text
	pod, err := parse(text, name)
	if m.err = err; err == nil {
		m.pod = pod
	}
	return m, err
}

// parse returns the pod of a file as kubelet names and marks it.
func (s *Pods) parse(text []byte, file string) (*corev1.Pod, error) {
	node := s.o.NodeName
	documents := 0
	for r := yaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(text))); ; {
		d, err := r.Read()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, err
		}
		if len(bytes.TrimSpace(d)) > 0 {
			documents++
		}
	}
	if documents > 1 {
		return nil, fmt.Errorf("it has %d documents: want one Pod", documents)
	}
	o := kjson.SerializerOptions{Yaml: true, Strict: true}
	obj, kind, err := kjson.NewSerializerWithOptions(kjson.DefaultMetaFactory, scheme.Scheme, scheme.Scheme, o).Decode(text, nil, nil)
	if err != nil {
		return nil, decodeError(err)
	}
	p, ok := obj.(*corev1.Pod)
	if !ok {
		return nil, fmt.Errorf("kind: it is a %s of %s: want Pod of v1", kind.Kind, kind.GroupVersion())
	}
	if p.Name == "" {
		return nil, errors.New("metadata.name: Required value")
	}
	content, err := json.Marshal(p)
	if err != nil {
		return nil, err
	}
	// Another file, node or content is another pod.
	sum := sha256.Sum256(slices.Concat([]byte(node+"\n"+file+"\n"), content))
	p.ObjectMeta = metav1.ObjectMeta{
		Namespace: p.Namespace, Name: p.Name + "-" + node, Labels: p.Labels, Annotations: p.Annotations,
		UID: types.UID(hex.EncodeToString(sum[:16])), CreationTimestamp: metav1.Now(),
	}
	if p.Namespace == "" {
		p.Namespace = corev1.NamespaceDefault
	}
	if p.Annotations == nil {
		p.Annotations = map[string]string{}
	}
	delete(p.Annotations, corev1.MirrorPodAnnotationKey)
	p.Annotations[configSource], p.Annotations[configHash] = "file", string(p.UID)
	// Who writes to the directory is root.
	p.Annotations[svc.PodSecurityAnnotation] = "privileged"
	p.Spec.NodeName = node
	stays := corev1.Toleration{Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute}
	p.Spec.Tolerations = append(p.Spec.Tolerations, stays)
	if at := podspec.APIReference(&p.Spec); at != nil {
		return nil, fmt.Errorf("%s: a static Pod runs without the API server, and cannot refer to its objects", at)
	}
	if errs := s.o.Complete(p); len(errs) > 0 {
		return nil, errs.ToAggregate()
	}
	return p, nil
}

// decodeError is err in one line.
func decodeError(err error) error {
	if runtime.IsStrictDecodingError(err) || strings.Contains(err.Error(), "\n") {
		return errors.New(strings.Join(strings.Fields(err.Error()), " "))
	}
	return err
}
