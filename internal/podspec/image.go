package podspec

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/svc"
)

// maxImage bounds how much of an image's name a message repeats.
const maxImage = 100

// CannotRun returns why nodes start no container of an image, unless they have a program for it, "" if they do.
func CannotRun(image string) string {
	if image == svc.HostImage {
		return ""
	}
	return fmt.Sprintf("image %.*q is not supported: fairlead runs the machine's own programs, write image: %s and a command, "+
		"or give the nodes a program for it (--image-map)", maxImage, image, svc.HostImage)
}

// Images are the programs that stand for images on a node. They are the entry points: containers that name a command run
// that instead.
type Images struct{ list []mapped }

// mapped is a program for images; the longest prefixes come first.
type mapped struct{ prefix, program string }

// ParseImages reads PREFIX=PROGRAM of each text.
func ParseImages(texts []string) (Images, error) {
	var out Images
	for _, text := range texts {
		prefix, program, ok := strings.Cut(text, "=")
		switch {
		case !ok || prefix == "" || program == "":
			return Images{}, fmt.Errorf("%.200q: want PREFIX=PROGRAM", text)
		case strings.ContainsAny(prefix, " \t\r\n"):
			return Images{}, fmt.Errorf("%.200q: the name of an image has no blanks", text)
		case prefix == svc.HostImage || prefix == svc.RegisteredImage:
			return Images{}, fmt.Errorf("%.200q: image %s has a meaning already", text, prefix)
		case !filepath.IsAbs(program):
			return Images{}, fmt.Errorf("%.200q: the path of the program must begin with /", text)
		case slices.ContainsFunc(out.list, func(m mapped) bool { return m.prefix == prefix }):
			return Images{}, fmt.Errorf("%.200q: there are two programs for %s", text, prefix)
		}
		out.list = append(out.list, mapped{prefix, filepath.Clean(program)})
	}
	slices.SortFunc(out.list, func(a, b mapped) int { return len(b.prefix) - len(a.prefix) })
	return out, nil
}

// Program returns the program for an image, by the longest prefix of its name; "" without one. A prefix ends where a part of
// the name does: that of "example.com/echo" is not for "example.com/echo-other".
func (m Images) Program(image string) string {
	for _, p := range m.list {
		rest, ok := strings.CutPrefix(image, p.prefix)
		if ok && (rest == "" || strings.HasSuffix(p.prefix, "/") || strings.HasSuffix(p.prefix, ":") || strings.IndexByte(":@/", rest[0]) >= 0) {
			return p.program
		}
	}
	return ""
}

// errNoCommand is for the image host, which has no entry point.
var errNoCommand = errors.New("command is required: with image host there is no default one")

// Command returns the command of a container before its arguments: its own one, or the program of its image. cannot is
// why the node never runs the image.
func (m Images) Command(image string, command, args []string) (before []string, cannot string, err error) {
	program := m.Program(image)
	switch {
	case image != svc.HostImage && program == "":
		return nil, CannotRun(image), nil
	case len(command) > 0 || program == "" && len(args) > 0:
		return command, "", nil
	case program == "":
		return nil, "", errNoCommand
	}
	return []string{program}, "", nil
}
