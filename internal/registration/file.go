package registration

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// keys are the keys of a document, with the function that sets each in a Spec.
var keys = map[string]func(*Spec, *yaml.Node) error{
	"name":         text(func(s *Spec) *string { return &s.Name }),
	"namespace":    text(func(s *Spec) *string { return &s.Namespace }),
	"ready":        text(func(s *Spec) *string { return &s.Ready }),
	"readyTimeout": text(func(s *Spec) *string { return &s.ReadyTimeout }),
	"unit":         text(func(s *Spec) *string { return &s.Unit }),
	"pidFile":      text(func(s *Spec) *string { return &s.PIDFile }),
	"address":      text(func(s *Spec) *string { return &s.Address }),
	"weight":       text(func(s *Spec) *string { return &s.Weight }),
	"labels": func(s *Spec, n *yaml.Node) error {
		if n.Kind != yaml.MappingNode {
			return errors.New("want KEY: VALUE, each on its own line, or {KEY: VALUE}")
		}
		s.Labels = map[string]string{}
		for i := 0; i+1 < len(n.Content); i += 2 {
			k, v := n.Content[i], n.Content[i+1]
			if v.Kind != yaml.ScalarNode {
				return fmt.Errorf("the value of %s: want a text", k.Value)
			}
			if _, twice := s.Labels[k.Value]; twice {
				return fmt.Errorf("%s is given twice", k.Value)
			}
			s.Labels[k.Value] = v.Value
		}
		return nil
	},
	"ports": func(s *Spec, n *yaml.Node) error {
		if n.Kind != yaml.SequenceNode {
			return errors.New("want a list, such as [redis=6379]")
		}
		for _, v := range n.Content {
			if v.Kind != yaml.ScalarNode {
				return errors.New("want [NAME=]PORT[/tcp|udp|sctp], for example redis=6379")
			}
			s.Ports = append(s.Ports, v.Value)
		}
		return nil
	},
}

func text(of func(*Spec) *string) func(*Spec, *yaml.Node) error {
	return func(s *Spec, n *yaml.Node) error {
		if n.Kind != yaml.ScalarNode || n.Tag == "!!null" {
			return errors.New("want a text")
		}
		*of(s) = n.Value
		return nil
	}
}

// Parse reads programs from YAML: documents with the keys name, namespace, labels, ports,
// ready, readyTimeout, unit, pidFile, address and weight. Each has to make a Pod on a node. name is that of the
// file; errors begin with it and the number of a line.
func Parse(name, node string, data []byte) (specs []Spec, err error) {
	seen := map[string]int{}
	for decoder := yaml.NewDecoder(bytes.NewReader(data)); ; {
		var doc yaml.Node
		switch err := decoder.Decode(&doc); {
		case errors.Is(err, io.EOF):
			return specs, nil
		case err != nil:
			return nil, syntaxError(name, err)
		}
		if len(doc.Content) == 0 || doc.Content[0].Tag == "!!null" {
			continue
		}
		s, err := parseOne(name, node, doc.Content[0])
		if err != nil {
			return nil, err
		}
		id := s.Namespace + "/" + s.Name
		if line, twice := seen[id]; twice {
			return nil, fmt.Errorf("%s:%d: name: %s is in line %d as well", name, doc.Content[0].Line, s.Name, line)
		}
		seen[id] = doc.Content[0].Line
		specs = append(specs, s)
	}
}

// Document returns the text of a file that describes s, as Parse reads it.
func (s *Spec) Document() ([]byte, error) {
	return yaml.Marshal(struct {
		Name         string            `yaml:"name"`
		Namespace    string            `yaml:"namespace,omitempty"`
		Labels       map[string]string `yaml:"labels,omitempty"`
		Ports        []string          `yaml:"ports"`
		Ready        string            `yaml:"ready,omitempty"`
		ReadyTimeout string            `yaml:"readyTimeout,omitempty"`
		Unit         string            `yaml:"unit,omitempty"`
		PIDFile      string            `yaml:"pidFile,omitempty"`
		Address      string            `yaml:"address,omitempty"`
		Weight       string            `yaml:"weight,omitempty"`
	}{s.Name, s.Namespace, s.Labels, s.Ports, s.Ready, s.ReadyTimeout, s.Unit, s.PIDFile, s.Address, s.Weight})
}

// syntaxError puts the line of an error of the YAML reader behind the file's name.
func syntaxError(name string, err error) error {
	text := strings.TrimPrefix(err.Error(), "yaml: ")
	if rest, ok := strings.CutPrefix(text, "line "); ok {
		return fmt.Errorf("%s:%s", name, rest)
	}
	return fmt.Errorf("%s: %s", name, text)
}

func parseOne(name, node string, n *yaml.Node) (Spec, error) {
	s := Spec{Node: node}
	at := func(line int, field string, err error) error {
		return fmt.Errorf("%s:%d: %s: %w", name, line, field, err)
	}
	if n.Kind != yaml.MappingNode {
		return s, fmt.Errorf("%s:%d: want the fields of a program: %s", name, n.Line, strings.Join(slices.Sorted(maps.Keys(keys)), ", "))
	}
	lines := map[string]int{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		k, v := n.Content[i], n.Content[i+1]
		set, known := keys[k.Value]
		if !known {
			return s, at(k.Line, k.Value, fmt.Errorf("no such field; want one of %s", strings.Join(slices.Sorted(maps.Keys(keys)), ", ")))
		}
		if lines[k.Value] > 0 {
			return s, at(k.Line, k.Value, fmt.Errorf("it is in line %d as well", lines[k.Value]))
		}
		lines[k.Value] = k.Line
		for v.Kind == yaml.AliasNode {
			v = v.Alias
		}
		if err := set(&s, v); err != nil {
			return s, at(v.Line, k.Value, err)
		}
	}
	if _, err := s.Pod(); err != nil {
		var wrong FieldError
		if errors.As(err, &wrong) {
			line := n.Line
			if lines[wrong.Field] > 0 {
				line = lines[wrong.Field]
			}
			return s, at(line, wrong.Field, wrong.Err)
		}
		return s, at(n.Line, "name", err)
	}
	return s, nil
}
