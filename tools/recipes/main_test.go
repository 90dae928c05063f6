package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const folder = "../../docs/recipes"

func read(t *testing.T, name string) string {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(folder, name))
	if err != nil {
		t.Fatal(err)
	}
	return string(content)
}

func TestEveryRecipeDecodesIntoItsOwnType(t *testing.T) {
	found, err := filepath.Glob(filepath.Join(folder, "*.yaml"))
	if err != nil || len(found) < 5 {
		t.Fatalf("%d recipes, %v", len(found), err)
	}
	for _, path := range found {
		if _, err := check([]byte(read(t, filepath.Base(path)))); err != nil {
			t.Errorf("%s: %v", path, err)
		}
	}
}

func TestAMistakeFailsTheCheck(t *testing.T) {
	for _, planted := range []struct{ recipe, right, wrong, said string }{
		{"deployment.yaml", "startupProbe:", "startUpProbe:", `unknown field "spec.template.spec.containers[0].startUpProbe"`},
		{"deployment.yaml", "  replicas: 2", "  replica: 2", `unknown field "spec.replica"`},
		{"deployment.yaml", "memory: 24Gi", "memory: 24Gibi", "quantities must match"},
		{"deployment.yaml", "replicas: 2", "replicas: two", "cannot unmarshal"},
		{"deployment.yaml", "runAsNonRoot: true", "runAsNonRoot: false", "the level restricted forbids it"},
		{"deployment.yaml", "{drop: [ALL]}", "{drop: [CHOWN]}", "the level restricted forbids it"},
		{"deployment.yaml", "kind: Deployment", "kind: Deploymint", "no kind"},
		{"image-volume.yaml", "pullPolicy: IfNotPresent", "imagePullPolicy: IfNotPresent", "unknown field"},
		{"warm-daemonset.yaml", "hostPath: {path:", "hostPaths: {path:", "unknown field"},
		{"job.yaml", "ttlSecondsAfterFinished:", "ttlSecondsAfterFinish:", "unknown field"},
		{"job.yaml", "restartPolicy: Never", "restartPolicy: Never\n      restartPolicy: Always", "already set"},
		{"kserve.yaml", "supportedUriFormats:", "supportedURIFormats:", "Required value"},
		{"kserve.yaml", "  predictor:\n", "  predictors:\n", "Required value"},
		{"kserve.yaml", "startupProbe:", "startUpProbe:", `unknown field ["spec.predictor.containers[0].startUpProbe"]`},
		{"kserve.yaml", "  workloadType:", "  workloadTypes:", "unknown field"},
	} {
		text := read(t, planted.recipe)
		if !strings.Contains(text, planted.right) {
			t.Errorf("%s has no %q", planted.recipe, planted.right)
			continue
		}
		_, err := check([]byte(strings.Replace(text, planted.right, planted.wrong, 1)))
		if err == nil || !strings.Contains(err.Error(), planted.said) {
			t.Errorf("%s with %q: %v", planted.recipe, planted.wrong, err)
		}
	}
}

func TestAFileWithoutDocumentsFailsTheCheck(t *testing.T) {
	if _, err := check(nil); err == nil {
		t.Error("an empty file is no recipe")
	}
}
